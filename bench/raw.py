"""Everything that was measured, request by request, in one file."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.compare import Turn
from bench.load.request import Record
from core.errors import InvalidRequest


def check_writable(path: Path) -> None:
    """Raises InvalidRequest where no file can be. To be asked before a long run."""
    if path.is_dir() or not path.parent.is_dir():
        raise InvalidRequest(f"--raw {path}: no file can be written there", field="raw")


def write_raw(path: Path, document: Mapping[str, Any], turns: Sequence[Turn]) -> None:
    """The figures, and under `records` each turn's. Raises InvalidRequest."""
    records = [
        {
            "case": turn.case,
            "round": turn.round,
            "arm": turn.arm,
            "requests": as_json(turn.measurement.records),
        }
        for turn in turns
    ]
    write_json(path, {**document, "records": records})


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Raises InvalidRequest where it cannot be written."""
    try:
        path.write_text(json.dumps(document))
    except OSError as error:
        raise InvalidRequest(f"cannot write {path}: {error.strerror}", field="raw") from error


def as_json(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Times in seconds after the load began."""
    return [asdict(record) for record in records]
