"""From a file, the environment and flags to one configuration."""

import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from core.config import ClusterConfig
from core.config_section import Section
from core.errors import ConfigError

# TANDEM__GATEWAY__HTTP_PORT is the setting gateway.http_port.
_PREFIX = "TANDEM__"
_LOCAL = "127.0.0.1"


def cluster_config(
    file: Path | None,
    flags: Mapping[str, object],
    environment: Mapping[str, str] = os.environ,
) -> ClusterConfig:
    """The file's settings, the environment's laid over them, and the flags' over both.

    `flags` maps a setting's dotted name to its value; one that is None was not given. Raises
    ConfigError that names the file, the environment or the command line, and the setting.
    """
    config = ClusterConfig.from_toml(file) if file else ClusterConfig()
    # Together, not one by one: some are only right beside others.
    variables = {
        variable.removeprefix(_PREFIX).lower().replace("__", "."): _parsed(value)
        for variable, value in environment.items()
        if variable.startswith(_PREFIX)
    }
    config = _laid_over(config, variables, source="environment")
    given = {setting: value for setting, value in flags.items() if value is not None}
    return _laid_over(config, given, source="command line")


def _laid_over(config: ClusterConfig, given: Mapping[str, object], *, source: str) -> ClusterConfig:
    if not given:
        return config
    values: dict[str, Any] = config.model_dump(exclude_unset=True)
    if "models" in given:  # they win over the one that was given before
        for name in ("model", "served_name"):
            values.pop(name, None)
    for setting, value in given.items():
        section, _, name = setting.rpartition(".")
        if section and not isinstance(getattr(config, section, None), Section):
            raise ConfigError(f"{source}: {setting}: there are no settings {section}")
        (values.setdefault(section, {}) if section else values)[name] = value
    return ClusterConfig.validated(values, source=source)


def _parsed(value: str) -> object:
    """As in the file: a number, a truth value, a list or a quoted string; else the text itself."""
    try:
        return tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return value


def reachable_at(config: ClusterConfig) -> ClusterConfig:
    """For a process whose peers are elsewhere: KV blocks, too, come to where it is reached."""
    network, transfer = config.network, config.transfer
    if network.advertise_host is None or transfer.tcp_host != _LOCAL:
        return config
    transfer = transfer.model_copy(update={"tcp_host": network.advertise_host})
    return config.model_copy(update={"transfer": transfer})


def model_flags(models: Sequence[str], names: Sequence[str]) -> dict[str, object]:
    """The settings that `--model` and `--served-name` give, each as often as it comes.

    Raises ConfigError where a name is nobody's, or a model of several lacks its own.
    """
    if len(models) < 2 and len(names) < 2:
        return {"model": next(iter(models), None), "served_name": next(iter(names), None)}
    if names and len(names) != len(models):
        raise ConfigError(
            f"command line: served_name: {len(names)} given for {len(models)} models; as many as "
            "models are, or none"
        )
    settings: list[dict[str, object]] = [{"model": model} for model in models]
    for each, name in zip(settings, names, strict=False):
        each["served_name"] = name
    return {"models": settings}
