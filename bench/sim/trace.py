"""Requests as files have them: lengths, and where there are such, times and prefixes.

CSV with a header, or JSON lines; the columns are those of the public traces (`bench.load.traces`
says which), of any file. A mistake is told with its row, which is the file's line, and its column.
"""

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from bench.load.traces import TRACES
from core.errors import InvalidRequest

# Tokens that one entry of hash_ids stands for, in Mooncake's traces.
HASHED_TOKENS = 512
_PROMPT = ("ContextTokens", "input_length", "num_prefill_tokens", "prompt_tokens")
_ANSWER = ("GeneratedTokens", "output_length", "num_decode_tokens", "output_tokens")
_TIME = ("TIMESTAMP", "timestamp", "arrival_s")
_HASHES = "hash_ids"
_LARGEST = 10_000_000


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request. `arrival_s` counts from the first row; None where the file has no times.

    `line` is where the file has it; None where it comes from no file.
    """

    prompt_tokens: int
    output_tokens: int
    arrival_s: float | None = None
    hash_ids: tuple[int, ...] = ()
    line: int | None = field(default=None, compare=False)


def read_trace(name: str, data: Path | None) -> list[TraceRow]:
    """Of a public trace's name under the folder `data`, or of a file's path.

    Raises InvalidRequest that names the file, the row and the column.
    """
    path = _path(name, data)
    try:
        # Some spreadsheets put a mark before the first column's name, which is none of it.
        with path.open(newline="", encoding="utf-8-sig") as lines:
            raw = _csv(path, lines) if path.suffix == ".csv" else _json(path, lines)
            rows = list(_parsed(path, raw))
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}", field="trace") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path} is not text: {error}", field="trace") from error
    if not rows:
        raise InvalidRequest(f"{path}: no rows", field="trace")
    return rows


def _path(name: str, data: Path | None) -> Path:
    known = TRACES.get(name)
    if known is None:
        path = Path(name)
        if path.suffix not in (".csv", ".jsonl"):
            raise InvalidRequest(
                f"no trace {name}: a file that ends in .csv or .jsonl, or one of "
                f"{', '.join(TRACES)}",
                field="trace",
            )
        return path
    if data is None:
        raise InvalidRequest(
            f"the trace {name} needs --data, a folder with {known.file}", field="data"
        )
    return data / known.file


Raw = tuple[int, Mapping[str, Any]]


def _csv(path: Path, lines: Iterator[str]) -> Iterator[Raw]:
    reader = csv.DictReader(lines)
    while True:
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise _wrong(path, reader.line_num + 1, f"not CSV: {error}") from error
        yield reader.line_num, row


def _json(path: Path, lines: Iterator[str]) -> Iterator[Raw]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _wrong(path, number, f"not JSON: {error}") from error
        if not isinstance(row, dict):
            raise _wrong(path, number, "not an object")
        yield number, row


def _parsed(path: Path, rows: Iterator[Raw]) -> Iterator[TraceRow]:
    began_s = last_s = None
    timed: bool | None = None  # whether the rows have times: all of them, or none
    for number, row in rows:
        prompt = _length(path, number, row, _PROMPT)
        answer = _length(path, number, row, _ANSWER)
        column = next((name for name in _TIME if name in row), None)
        if timed is None:
            timed = column is not None
        elif timed != (column is not None):
            what = "is missing, and rows above have it" if timed else "rows above have no time"
            raise _wrong(path, number, what, column or " or ".join(_TIME))
        arrival_s = None
        if column is not None:
            time_s = _time_s(path, number, column, row[column])
            if last_s is not None and time_s < last_s:
                raise _wrong(path, number, f"{row[column]} is before the row above it", column)
            began_s = time_s if began_s is None else began_s
            last_s, arrival_s = time_s, time_s - began_s
        hash_ids = _hash_ids(path, number, row, prompt)
        yield TraceRow(prompt, answer, arrival_s, hash_ids, number)


def _length(path: Path, number: int, row: Mapping[str, Any], names: tuple[str, ...]) -> int:
    column = next((name for name in names if name in row), None)
    if column is None:
        raise _wrong(path, number, "is missing", " or ".join(names))
    value = row[column]
    try:
        length = int(value)
    except (TypeError, ValueError):
        raise _wrong(path, number, f"{value!r} is not a number of tokens", column) from None
    if isinstance(value, bool | float) or not 1 <= length <= _LARGEST:
        raise _wrong(path, number, f"{value} tokens: 1 to {_LARGEST:,}", column)
    return length


_SCALES: dict[str, Callable[[Any], float]] = {
    "TIMESTAMP": lambda text: _date_s(str(text)),
    "timestamp": lambda milliseconds: float(milliseconds) / 1e3,
    "arrival_s": float,
}


def _time_s(path: Path, number: int, column: str, value: object) -> float:
    try:
        time_s = _SCALES[column](value)
    except (TypeError, ValueError, OverflowError):
        time_s = -1.0
    if not 0 <= time_s < float("inf"):
        raise _wrong(path, number, f"{value!r} is not a time", column)
    return time_s


def _date_s(text: str) -> float:
    """Azure writes seven decimals, of which Python's clock has six."""
    whole, _, fraction = text.partition(".")
    parsed = datetime.fromisoformat(f"{whole}+00:00")
    return parsed.timestamp() + (float(f"0.{fraction}") if fraction else 0.0)


def _hash_ids(
    path: Path, number: int, row: Mapping[str, Any], prompt_tokens: int
) -> tuple[int, ...]:
    found = row.get(_HASHES)
    if found is None:
        return ()
    if not isinstance(found, list) or not all(
        type(each) is int and 0 <= each < 2**64 for each in found
    ):
        raise _wrong(path, number, "not a list of whole numbers from 0 to 2^64 - 1", _HASHES)
    if len(found) * HASHED_TOKENS < prompt_tokens - HASHED_TOKENS:
        raise _wrong(path, number, f"{len(found)} ids for {prompt_tokens} tokens", _HASHES)
    return tuple(found)


def _wrong(path: Path, row: int, what: str, column: str | None = None) -> InvalidRequest:
    where = f"{path}: row {row}" + (f", column {column}" if column else "")
    return InvalidRequest(f"{where}: {what}", field=column or "trace")
