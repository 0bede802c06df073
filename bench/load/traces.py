"""Lengths of real requests, read from public traces.

The files keep their publishers' names: Azure's LLM inference traces of 2023 (Splitwise, ISCA 2024),
Mooncake's traces (FAST 2025), and the arXiv summarization lengths that Vidur ships. Each row is one
request: tokens of the prompt and of the answer.
"""

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from core.errors import InvalidRequest

Row = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Trace:
    """Where a trace lies under the data folder, and how its lines are read."""

    file: str
    read: Callable[[Iterable[str]], Iterator[Row]]


def _csv(prompt: str, answer: str) -> Callable[[Iterable[str]], Iterator[Row]]:
    def read(lines: Iterable[str]) -> Iterator[Row]:
        return ((int(row[prompt]), int(row[answer])) for row in csv.DictReader(lines))

    return read


def _mooncake(lines: Iterable[str]) -> Iterator[Row]:
    rows = (json.loads(line) for line in lines if line.strip())
    return ((int(row["input_length"]), int(row["output_length"])) for row in rows)


_AZURE = _csv("ContextTokens", "GeneratedTokens")
TRACES = {
    "azure-conv": Trace("azure/AzureLLMInferenceTrace_conv.csv", _AZURE),
    "azure-code": Trace("azure/AzureLLMInferenceTrace_code.csv", _AZURE),
    "mooncake-conversation": Trace("mooncake/conversation_trace.jsonl", _mooncake),
    "mooncake-synthetic": Trace("mooncake/synthetic_trace.jsonl", _mooncake),
    "arxiv": Trace(
        "vidur/arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv",
        _csv("num_prefill_tokens", "num_decode_tokens"),
    ),
}


def read_lengths(name: str, data: Path | None) -> list[Row]:
    """(prompt tokens, answer tokens) of every request. Raises InvalidRequest."""
    trace = TRACES.get(name)
    if trace is None:
        raise InvalidRequest(f"no trace {name}: one of {', '.join(TRACES)}", field="trace")
    if data is None:
        raise InvalidRequest(
            f"the trace {name} needs --data, a folder with {trace.file}", field="data"
        )
    path = data / trace.file
    try:
        with path.open(newline="") as lines:
            rows = [row for row in trace.read(lines) if row[0] > 0 and row[1] > 0]
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}", field="data") from error
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(f"{path} is not the trace {name}: {error!r}", field="data") from error
    return rows


def fitting(rows: list[Row], *, scale: float, window: int | None) -> list[Row]:
    """The lengths scaled, without those whose prompt and answer exceed the window together."""
    scaled = [(max(1, round(p * scale)), max(1, round(a * scale))) for p, a in rows]
    return [row for row in scaled if window is None or sum(row) <= window]
