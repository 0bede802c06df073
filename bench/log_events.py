"""A cluster's log as events: one JSON object each, of whichever process."""

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

_DECODER = json.JSONDecoder()


def read_events(log: Path, *names: str) -> list[dict[str, Any]]:
    """The events of these names so far, in order."""
    lines = log.read_text().splitlines()
    return [event for line in lines for event in _events(line) if event.get("event") in names]


def _events(line: str) -> Iterator[dict[str, Any]]:
    """The objects of a line: several where processes wrote at once, none where it is half there."""
    while line.startswith("{"):
        try:
            event, end = _DECODER.raw_decode(line)
        except json.JSONDecodeError:
            return
        yield event
        line = line[end:]


def unix_s(event: dict[str, Any]) -> float:
    """When it was logged."""
    return datetime.fromisoformat(event["timestamp"]).timestamp()
