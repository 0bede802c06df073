"""A histogram for what happens with every token: one thread observes it, without a lock."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class LoopHistogram:
    """Owned by the event loop, where it is read as well.

    An observation costs a third of the library's, which is ready for threads and scans its bounds.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """The same value, so many times."""
        self._counts[bisect_left(self.bounds, value)] += times
        self._sum += value * times

    @property
    def counts(self) -> tuple[int, ...]:
        """Observations in each bucket by itself, the last one past every bound."""
        return tuple(self._counts)

    @property
    def count(self) -> int:
        """Observations so far."""
        return sum(self._counts)

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Adds what was observed to a family, under these values of its labels."""
        total, buckets = 0, []
        names = (*(str(float(bound)) for bound in self.bounds), "+Inf")
        for name, count in zip(names, self._counts, strict=True):
            total += count
            buckets.append((name, total))
        family.add_metric(labels, buckets, self._sum)


class LoopHistograms(Collector):
    """Those of one name, by the values of their labels."""

    def __init__(self, name: str, words: str, labels: Sequence[str], bounds: Sequence[float]):
        self._name, self._words, self._labels = name, words, tuple(labels)
        self._bounds = tuple(bounds)
        self._made: dict[tuple[str, ...], LoopHistogram] = {}

    def labels(self, *values: str) -> LoopHistogram:
        """The one with these values, made where there is none."""
        return self._made.setdefault(values, LoopHistogram(self._bounds))

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._words, labels=self._labels)
        for values, made in self._made.items():
            made.add_to(family, values)
        yield family
