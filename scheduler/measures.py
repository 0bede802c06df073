"""What the scheduler measures itself: how fast the queue drains, links carry, and answers end."""

import math
from collections.abc import Iterable

from core.messages import Counter

_DRAIN_MEMORY_S = 10.0  # of time in which something waited
_LEAST_DRAIN_S = 0.5
_NEW = 0.1  # weight of a new answer
_NEW_PACE = 0.2
# A prompt that was late by more than this was not late for reading.
_LEAST_PACE, _MOST_PACE = 0.5, 4.0
_LINK_MEMORY = 0.8  # of what was seen, per report


class DrainRate:
    """Work that leaves the queue per second, while something waits there."""

    def __init__(self) -> None:
        self._served = self._busy_s = 0.0
        self._since_s: float | None = None

    @property
    def per_s(self) -> float:
        """In units of `Waiting.cost`. 0 until it was seen for long enough."""
        return self._served / self._busy_s if self._busy_s >= _LEAST_DRAIN_S else 0.0

    def observe(self, now_s: float, *, served: float, waiting: bool) -> None:
        """So much was placed just now; `waiting`: something still waits behind it."""
        if self._since_s is not None:
            passed_s = max(0.0, now_s - self._since_s)
            kept = math.exp(-passed_s / _DRAIN_MEMORY_S)
            self._served = self._served * kept + served
            self._busy_s = self._busy_s * kept + passed_s
        self._since_s = now_s if waiting else None


class Pace:
    """By how much a worker reads slower than its steps say: others share its machine, or its steps.

    It only says when the worker will be free. Where a prompt would be read soonest is judged by
    what steps cost, which is measured on its own.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self._done_s = 0.0

    def observe(self, placed_s: float, expected_s: float, now_s: float) -> None:
        """A prompt that was placed then, and was to take so long, has been read."""
        took_s = now_s - max(placed_s, self._done_s)
        self._done_s = now_s
        if expected_s > 0 and took_s > 0:
            ratio = min(max(took_s / expected_s, _LEAST_PACE), _MOST_PACE)
            self.factor = (1 - _NEW_PACE) * self.factor + _NEW_PACE * ratio


class AnswerLength:
    """Tokens of a mean answer, from how long requests decode and what a step takes."""

    def __init__(self) -> None:
        self.tokens = 0.0

    def observe(self, decode_s: float, step_s: float) -> None:
        """A request was decoded for so long, on a worker whose steps took so long."""
        if step_s <= 0 or decode_s < 0:
            return
        tokens = 1 + decode_s / step_s
        self.tokens = tokens if not self.tokens else (1 - _NEW) * self.tokens + _NEW * tokens


class LinkSpeed:
    """Bytes per second of a prefill worker's hand-offs, from what it counts."""

    def __init__(self) -> None:
        self._last: tuple[int, int] | None = None
        self._bytes = self._busy_us = 0.0

    @property
    def bytes_per_s(self) -> float:
        """0 until something was sent."""
        return self._bytes / self._busy_us * 1e6 if self._busy_us else 0.0

    def observe(self, counters: Iterable[Counter]) -> None:
        """One report: bytes, and microseconds in which they were sent, over every transport."""
        num_bytes = busy_us = 0
        for counter in counters:
            if counter.name.endswith("_bytes_sent"):
                num_bytes += counter.value
            elif counter.name.endswith("_busy_us"):
                busy_us += counter.value
        if self._last is not None:
            sent, busy = num_bytes - self._last[0], busy_us - self._last[1]
            if sent > 0 and busy > 0:
                self._bytes = _LINK_MEMORY * self._bytes + sent
                self._busy_us = _LINK_MEMORY * self._busy_us + busy
        self._last = (num_bytes, busy_us)
