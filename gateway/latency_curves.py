"""How fast answers have come of late: percentiles over a moving window, some minutes back.

For the operators' page and `tandem top`. Prometheus has the histograms for everything else.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from prometheus_client import Counter, Gauge

from gateway.recent import RecentRequests
from gateway.request_metrics import RequestMetrics

INTERVAL_S = 2.0
_WINDOW = 15  # intervals: 30 s
_KEPT = 300  # samples: 10 min


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What the last window was like. None where nothing was measured in it."""

    at: float  # Unix time
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    itl_p50_s: float | None
    itl_p95_s: float | None
    tokens_per_s: float
    in_flight: int


@dataclass(frozen=True, slots=True)
class _Reading:
    at_s: float  # by the monotonic clock
    tokens: float
    itl_counts: tuple[int, ...]


class LatencyCurves:
    """Of each model, and of all together. Owned by the event loop; `run` is a task of the
    gateway's."""

    def __init__(
        self,
        metrics: Sequence[RequestMetrics],
        recent: RecentRequests,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`metrics` are those of each model."""
        self._whole = _Curves(metrics, recent, None, clock)
        self._of_model = {
            each.model: _Curves([each], recent, each.model, clock) for each in metrics
        }

    async def run(self) -> None:
        """Samples until it is cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            self.sample()

    def sample(self) -> None:
        """Takes down what the window up to now was like."""
        for curves in (self._whole, *self._of_model.values()):
            curves.sample()

    def told(self, model: str | None = None) -> dict[str, Any]:
        """As JSON has it: all samples of this model or of all together, the oldest first, and of
        each model the last one, None before there is one. Raises KeyError for another model."""
        curves = self._whole if model is None else self._of_model[model]
        return {
            "interval_s": INTERVAL_S,
            "window_s": INTERVAL_S * _WINDOW,
            "samples": [asdict(sample) for sample in curves.samples],
            "models": {name: each.last() for name, each in self._of_model.items()},
        }


class _Curves:
    """Of some models. `of` is the one whose requests count, None for those of all."""

    def __init__(
        self,
        metrics: Sequence[RequestMetrics],
        recent: RecentRequests,
        of: str | None,
        clock: Callable[[], float],
    ) -> None:
        self._metrics = metrics
        self._recent = recent
        self._of = of
        self._clock = clock
        self._readings: deque[_Reading] = deque([self._read()], maxlen=_WINDOW)
        self.samples: deque[Sample] = deque(maxlen=_KEPT)

    def last(self) -> dict[str, Any] | None:
        return asdict(self.samples[-1]) if self.samples else None

    def sample(self) -> None:
        now, then = self._read(), self._readings[0]
        self._readings.append(now)
        bounds = self._metrics[0].inter_token_s.bounds
        counts = [b - a for a, b in zip(then.itl_counts, now.itl_counts, strict=True)]
        ttfts_s = sorted(self._recent.ttfts_s(then.at_s, self._of))
        self.samples.append(
            Sample(
                at=round(time.time(), 3),
                ttft_p50_s=_quantile(ttfts_s, 0.5),
                ttft_p95_s=_quantile(ttfts_s, 0.95),
                itl_p50_s=histogram_quantile(bounds, counts, 0.5),
                itl_p95_s=histogram_quantile(bounds, counts, 0.95),
                tokens_per_s=round((now.tokens - then.tokens) / max(now.at_s - then.at_s, 1e-9), 1),
                in_flight=int(sum(_value(each.in_flight) for each in self._metrics)),
            )
        )

    def _read(self) -> _Reading:
        return _Reading(
            self._clock(),
            sum(_value(each.generation_tokens) for each in self._metrics),
            tuple(
                map(sum, zip(*(each.inter_token_s.counts for each in self._metrics), strict=True))
            ),
        )


def histogram_quantile(bounds: Sequence[float], counts: Sequence[int], q: float) -> float | None:
    """The q-quantile by buckets' upper bounds and counts, evenly spread within each.

    `counts` has one more, past the last bound, for which that bound stands. None where there are
    none.
    """
    rank = q * sum(counts)
    if rank <= 0:
        return None
    for (low, high), count in zip(pairwise((0.0, *bounds)), counts, strict=False):
        if rank <= count:
            return low + (high - low) * rank / count
        rank -= count
    return bounds[-1]


def _quantile(values: Sequence[float], q: float) -> float | None:
    """The nearest one of sorted values."""
    return values[min(len(values) - 1, int(q * len(values)))] if values else None


def _value(metric: Counter | Gauge) -> float:
    return next(iter(metric.collect())).samples[0].value
