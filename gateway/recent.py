"""The last requests for an answer: what became of each, and its waterfall. Never a word of theirs.

For the operators' page and `tandem trace`; bounded in number and in bytes, the oldest forgotten
first.
"""

import json
import time
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any

from gateway.request_record import RequestRecord, loggable
from gateway.waterfall import Stage

_MAX_BYTES = 4 * 2**20
# What Python needs for an entry beside its text, about.
_OVERHEAD_BYTES = 400
# An id may be told by its beginning, where that names one request.
MIN_PREFIX_CHARS = 6
_DIGITS = 6  # of a second


@dataclass(frozen=True, slots=True)
class _Entry:
    ids: tuple[str, ...]
    # What is searched, in small letters.
    words: str
    ended_s: float
    ttft_s: float | None
    model: str | None
    encoded: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.encoded) + len(self.words) + sum(map(len, self.ids)) + _OVERHEAD_BYTES

    def whole(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(self.encoded)
        return told


class RecentRequests:
    """Owned by the event loop."""

    def __init__(self, max_requests: int, *, max_bytes: int = _MAX_BYTES) -> None:
        """`max_requests` 0 keeps none."""
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._entries: deque[_Entry] = deque()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, record: RequestRecord, status: int | str) -> None:
        """The request is over. One that asked for no answer is left out."""
        if not record.operation or self._max_requests == 0:
            return
        entry = _entry(record, status)
        self._entries.append(entry)
        self.num_bytes += entry.num_bytes
        while len(self._entries) > self._max_requests or self.num_bytes > self._max_bytes:
            self.num_bytes -= self._entries.popleft().num_bytes

    def find(self, wanted: str) -> list[dict[str, Any]]:
        """Those of this request id, job or trace id, or of one that begins so; the latest first."""
        same = [entry for entry in reversed(self._entries) if wanted in entry.ids]
        if not same and len(wanted) >= MIN_PREFIX_CHARS:
            same = [
                entry
                for entry in reversed(self._entries)
                if any(each.startswith(wanted) for each in entry.ids)
            ]
        return [entry.whole() for entry in same]

    def search(self, text: str, limit: int, model: str | None = None) -> list[dict[str, Any]]:
        """The latest that have every word of the text among what is told of them; no stages.

        Of this model's alone, where one is given.
        """
        words = text.lower().split()
        found: list[dict[str, Any]] = []
        for entry in reversed(self._entries):
            if len(found) >= limit:
                break
            if model in (None, entry.model) and all(word in entry.words for word in words):
                told = entry.whole()
                del told["stages"]
                found.append(told)
        return found

    def ttfts_s(self, since_s: float, model: str | None = None) -> list[float]:
        """Times to the first token of what ended since then, by the monotonic clock; of this
        model's requests, where one is given."""
        found: list[float] = []
        for entry in reversed(self._entries):
            if entry.ended_s < since_s:
                break
            if entry.ttft_s is not None and model in (None, entry.model):
                found.append(entry.ttft_s)
        return found


def _entry(record: RequestRecord, status: int | str) -> _Entry:
    now_s = time.monotonic()
    ids = [record.request_id, record.job, record.trace.trace_id]
    outcome = record.outcome
    told: dict[str, Any] = {
        "request_id": record.request_id,
        "job": record.job,
        "trace_id": record.trace.trace_id,
        "operation": record.operation,
        "path": loggable(record.path),
        "model": record.model,
        "tenant": record.caller.tenant or None,
        "key": record.caller.key_id,
        "status": status,
        "outcome": str(outcome.kind) if outcome is not None else "refused",
        "reason": outcome.reason if outcome is not None else None,
        "began_at": round(time.time() - (now_s - record.started_s), 3),
        "duration_s": round(now_s - record.started_s, _DIGITS),
        "ttft_s": None if record.ttft_s is None else round(record.ttft_s, _DIGITS),
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "completion_tokens": record.completion_tokens,
        "choices": record.num_choices,
        "finish_reasons": record.finish_reasons[:16],
        "processes": list(OrderedDict.fromkeys(each.process for each in record.waterfall.stages)),
        "attempts": max((each.attempt for each in record.waterfall.stages), default=0),
        "stages": [_stage(each, record.started_s) for each in record.waterfall.stages],
    }
    searched = ("operation", "path", "model", "tenant", "key", "status", "outcome", "reason")
    words = [*(str(told[name]) for name in searched if told[name] is not None), *told["processes"]]
    known = tuple(each for each in ids if each)
    return _Entry(
        ids=known,
        words=" ".join((*known, *words)).lower(),
        ended_s=now_s,
        ttft_s=record.ttft_s,
        model=record.model,
        encoded=json.dumps(told, separators=(",", ":")).encode(),
    )


def _stage(stage: Stage, began_s: float) -> dict[str, Any]:
    """Times are seconds since the request came."""
    return {
        "name": str(stage.name),
        "process": stage.process,
        "start_s": round(stage.start_s - began_s, _DIGITS),
        "end_s": round(stage.end_s - began_s, _DIGITS),
        "attempt": stage.attempt,
        "error": stage.error,
    }
