"""What a server does once a load has come up to speed: answers in time, refusals, the rest."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from bench.load.request import Record
from core.errors import Unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Seconds after the load began, between which answers count."""

    from_s: float
    until_s: float

    @classmethod
    def of_closed_loop(cls, records: Sequence[Record], concurrency: int) -> Self:
        """From when every user had one answer, on average, to when the last request was sent.

        Raises Unavailable where the load was too short for that.
        """
        ended = sorted(record.finished_s for record in records)
        return cls._checked(ended[min(concurrency, len(ended)) - 1], _last_sent_s(records))

    @classmethod
    def of_open_loop(cls, records: Sequence[Record], settle_s: float) -> Self:
        """From `settle_s` to when the last request was sent. Raises Unavailable, as above."""
        return cls._checked(settle_s, _last_sent_s(records))

    @classmethod
    def _checked(cls, from_s: float, until_s: float) -> Self:
        if from_s >= until_s:
            raise Unavailable(
                f"the load had not settled ({from_s:.1f} s) when its last request was sent "
                f"({until_s:.1f} s): more requests are needed"
            )
        return cls(from_s=from_s, until_s=until_s)

    def good_per_s(self, records: Sequence[Record], deadline_s: float) -> float:
        """Answers per second that ended within the window, whole and in time."""
        ended = sum(
            self.from_s < record.finished_s <= self.until_s
            for record in records
            if is_good(record, deadline_s)
        )
        return ended / (self.until_s - self.from_s)


def is_good(record: Record, deadline_s: float) -> bool:
    """Whether the answer is whole, and was there within its time from when it was to be sent."""
    whole = record.ok and record.completion_tokens >= record.max_tokens
    return whole and record.e2e_s <= deadline_s


def refusal_s(record: Record) -> float | None:
    """Seconds until the client knew that it gets nothing; None where it got any token."""
    if record.ok or record.token_times_s:
        return None
    return record.finished_s - record.intended_s


def _last_sent_s(records: Sequence[Record]) -> float:
    return max(record.sent_s for record in records)
