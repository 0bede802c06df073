"""What becomes of the spans that a process records."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from core.telemetry.tracer import Tracer

_FATES = ("exported", "dropped", "failed")


class SpanCollector(Collector):
    """Reads the tracer at the time of the scrape; keeps nothing."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def collect(self) -> Iterator[Metric]:
        spans = CounterMetricFamily(
            "tandem_spans", "Spans by what became of them; none is kept waiting.", labels=("fate",)
        )
        counts = self._tracer.counters()
        for fate in _FATES:
            spans.add_metric((fate,), counts.get(f"spans_{fate}", 0))
        yield spans
