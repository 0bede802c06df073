"""Clusters of this code as arms: from one word on the command line to settings."""

import json
from typing import Any

from bench.arms import TandemArm
from bench.cluster import Settings, merged
from core.config import ClusterConfig
from core.errors import InvalidRequest


def parse_tandem_arm(text: str, below: Settings) -> TandemArm:
    """Of NAME=P:D or NAME=P:D,engine.dtype=float32,…: pool sizes, then settings over `below`.

    P = 0 is the colocated cluster: its decode workers read the prompts too. Values are JSON, or
    plain text where they are no JSON. Raises InvalidRequest, and ConfigError for a wrong setting.
    """
    name, _, value = text.partition("=")
    sizes, *pairs = value.split(",")
    prefill, _, decode = sizes.partition(":")
    if not (name and prefill.isdecimal() and decode.isdecimal()):
        raise InvalidRequest(f"--tandem {text} is not NAME=P:D", field="tandem")
    own: dict[str, object] = {"prefill_workers": int(prefill), "decode_workers": int(decode)}
    for pair in pairs:
        own = merged(own, _setting(pair))
    settings = merged(merged({"log_level": "warning"}, below), own)
    values: dict[str, Any] = json.loads(json.dumps(settings))
    ClusterConfig.validated(values, source=f"--tandem {name}")
    return TandemArm(name=name, settings=settings)


def _setting(pair: str) -> Settings:
    path, found, text = pair.partition("=")
    section, _, setting = path.rpartition(".")
    if not (found and setting) or "." in section:
        raise InvalidRequest(f"{pair} is not SETTING=VALUE", field="tandem")
    try:
        value: object = json.loads(text)
    except ValueError:
        value = text
    return {section: {setting: value}} if section else {setting: value}
