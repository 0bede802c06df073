"""Records into figures."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bench.load.request import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """What a good answer keeps to. None: no bound."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def __bool__(self) -> bool:
        return self.ttft_ms is not None or self.tpot_ms is not None

    def met(self, record: Record) -> bool:
        """Whether an answer came in time; no answer never does."""
        if not record.ok:
            return False
        tpot_s = record.tpot_s or 0.0
        return (self.ttft_ms is None or 1e3 * record.ttft_s <= self.ttft_ms) and (
            self.tpot_ms is None or 1e3 * tpot_s <= self.tpot_ms
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Milliseconds. Percentiles lie between the two nearest values, as numpy's do by default."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of_seconds(cls, values_s: Iterable[float]) -> "Distribution | None":
        """None where there is no value."""
        values = sorted(1e3 * value for value in values_s)
        if not values:
            return None
        return cls(
            count=len(values),
            mean=math.fsum(values) / len(values),
            p50=percentile(values, 50),
            p90=percentile(values, 90),
            p99=percentile(values, 99),
            max=values[-1],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One load's figures. Rates and latencies are those of the requests without an error.

    `goodput` is None without an SLO, `cached_tokens` where the server does not tell. Short answers
    have fewer tokens than asked for. `max_late_ms` is how far behind its schedule the client sent.
    """

    requests: int
    completed: int
    errors: Mapping[str, int]
    short_answers: int
    duration_s: float
    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int
    output_tokens_per_s: float
    requests_per_s: float
    goodput_requests_per_s: float | None
    ttft_ms: Distribution | None
    itl_ms: Distribution | None
    tpot_ms: Distribution | None
    e2e_ms: Distribution | None
    max_late_ms: float


def summarise(records: Sequence[Record], slo: Slo) -> Summary:
    """The figures of at least one record. The duration is from the first send to the last end."""
    done = [record for record in records if record.ok]
    began_s = min(record.intended_s for record in records)
    # Nothing takes no time, but a clock may not tell.
    duration_s = max(max(record.finished_s for record in records) - began_s, 1e-9)
    output_tokens = sum(record.completion_tokens for record in done)
    cached = [record.cached_tokens for record in done if record.cached_tokens is not None]
    tpots = (record.tpot_s for record in done)
    good = sum(slo.met(record) for record in records)
    return Summary(
        requests=len(records),
        completed=len(done),
        errors=dict(Counter(r.failure.kind for r in records if r.failure is not None)),
        short_answers=sum(record.completion_tokens < record.max_tokens for record in done),
        duration_s=duration_s,
        prompt_tokens=sum(record.prompt_tokens or 0 for record in done),
        cached_tokens=sum(cached) if cached else None,
        output_tokens=output_tokens,
        output_tokens_per_s=output_tokens / duration_s,
        requests_per_s=len(done) / duration_s,
        goodput_requests_per_s=good / duration_s if slo else None,
        ttft_ms=Distribution.of_seconds(record.ttft_s for record in done),
        itl_ms=Distribution.of_seconds(gap for record in done for gap in record.itls_s),
        tpot_ms=Distribution.of_seconds(tpot for tpot in tpots if tpot is not None),
        e2e_ms=Distribution.of_seconds(record.e2e_s for record in done),
        max_late_ms=1e3 * max(record.sent_s - record.intended_s for record in records),
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of values in ascending order, at least one."""
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)
