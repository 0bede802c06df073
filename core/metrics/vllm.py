"""Metrics under vLLM's names, where ours mean the same: existing boards then show this cluster.

Their labels are vLLM's, too: `engine`, here the number in the process's name, and `model_name`.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from core.messages import WorkerRef
from core.metrics.loop_histogram import LoopHistogram, LoopHistograms

_LABELS = ("engine", "model_name")
T = TypeVar("T")


def vllm_values(me: WorkerRef, model: str) -> tuple[str, str]:
    """What the two labels say of a process and a model."""
    return me.name.partition("-")[2] or "0", model


def vllm_gauge(name: str, words: str, *labels: str) -> GaugeMetricFamily:
    """For a collector, with no value yet."""
    return GaugeMetricFamily(name, words, labels=(*_LABELS, *labels))


class Labelled:
    """Makes metrics that carry vLLM's labels. `values` are those of this process and its model."""

    def __init__(
        self,
        registry: CollectorRegistry,
        me: WorkerRef,
        model: str,
        *,
        beside: "Labelled | None" = None,
    ) -> None:
        """`beside` one for another model, they have one set of metrics together."""
        self.registry = registry
        self._me = me
        self.model = model
        self.values = vllm_values(me, model)
        self._made: dict[str, Any] = {} if beside is None else beside._made

    def of(self, model: str) -> "Labelled":
        """The same metrics, for another model."""
        return Labelled(self.registry, self._me, model, beside=self)

    def once(self, name: str, make: Callable[[], T]) -> T:
        """What was made under this name for any model; the first who asks makes it."""
        if name not in self._made:
            self._made[name] = make()
        made: T = self._made[name]
        return made

    def histogram(self, name: str, words: str, bounds: Sequence[float]) -> Histogram:
        made = self.once(
            name,
            lambda: Histogram(name, words, _LABELS, buckets=bounds, registry=self.registry),
        )
        return made.labels(*self.values)

    def loop_histogram(self, name: str, words: str, bounds: Sequence[float]) -> LoopHistogram:
        """For what happens with every token."""

        def make() -> LoopHistograms:
            made = LoopHistograms(name, words, _LABELS, bounds)
            self.registry.register(made)
            return made

        return self.once(name, make).labels(*self.values)

    def counter(self, name: str, words: str, *labels: str) -> Counter:
        """With further labels it is yet to be labelled, with all of them."""
        made = self.once(
            name, lambda: Counter(name, words, (*_LABELS, *labels), registry=self.registry)
        )
        return made if labels else made.labels(*self.values)

    def gauge_family(
        self, name: str, words: str, value: float | None, *labels: str
    ) -> GaugeMetricFamily:
        """For a collector, with its one value; further labels come with no value yet."""
        family = vllm_gauge(name, words, *labels)
        if value is not None:
            family.add_metric(self.values, value)
        return family

    def counter_family(self, name: str, words: str, value: float) -> CounterMetricFamily:
        """For a collector, with its one value."""
        family = CounterMetricFamily(name, words, labels=_LABELS)
        family.add_metric(self.values, value)
        return family
