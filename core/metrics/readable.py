"""The registry's metrics as OpenTelemetry's SDK has them: what its exporters take.

There is one set of instruments, prometheus_client's. Names stay Prometheus' own, but for those of
OpenTelemetry's conventions, which get their dots back. Source of the mapping:
https://opentelemetry.io/docs/specs/otel/compatibility/prometheus_and_openmetrics/
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric as Family
from prometheus_client.samples import Sample

_CONVENTIONS = {
    "gen_ai_server_request_duration_seconds": "gen_ai.server.request.duration",
    "gen_ai_server_time_to_first_token_seconds": "gen_ai.server.time_to_first_token",
    "gen_ai_server_time_per_output_token_seconds": "gen_ai.server.time_per_output_token",
}
_CONVENTION_LABELS = {
    "gen_ai_operation_name": "gen_ai.operation.name",
    "gen_ai_provider_name": "gen_ai.provider.name",
    "gen_ai_request_model": "gen_ai.request.model",
    "gen_ai_response_model": "gen_ai.response.model",
    "error_type": "error.type",
}
_CUMULATIVE = AggregationTemporality.CUMULATIVE
# The smallest and the largest value, which nobody keeps: encoders leave None out.
_UNKNOWN: Any = None
Labels = tuple[tuple[str, str], ...]


def readable(
    registry: CollectorRegistry,
    resource: Resource,
    scope: InstrumentationScope,
    *,
    began_ns: int,
    now_ns: int,
) -> MetricsData:
    """Every metric of the registry as it is now. Times are Unix nanoseconds."""
    metrics = [
        metric
        for family in registry.collect()
        if (metric := _metric(family, began_ns, now_ns)) is not None
    ]
    scoped = ScopeMetrics(scope=scope, metrics=metrics, schema_url="")
    return MetricsData([ResourceMetrics(resource=resource, scope_metrics=[scoped], schema_url="")])


def _metric(family: Family, began_ns: int, now_ns: int) -> Metric | None:
    data: Sum | Gauge | Histogram
    if family.type == "histogram":
        data = Histogram(list(_histograms(family, began_ns, now_ns)), _CUMULATIVE)
    elif family.type == "counter":
        points = _numbers(family, f"{family.name}_total", began_ns, now_ns)
        data = Sum(list(points), _CUMULATIVE, is_monotonic=True)
    elif family.type in ("gauge", "info", "unknown"):
        name = f"{family.name}_info" if family.type == "info" else family.name
        data = Gauge(list(_numbers(family, name, began_ns, now_ns)))
    else:
        return None
    if not data.data_points:
        return None
    name = _CONVENTIONS.get(family.name, family.name)
    unit = "s" if family.name.endswith("_seconds") else ""
    return Metric(name=name, description=family.documentation, unit=unit, data=data)


def _numbers(family: Family, name: str, began_ns: int, now_ns: int) -> Iterator[NumberDataPoint]:
    for sample in family.samples:
        if sample.name == name:
            yield NumberDataPoint(_attributes(sample.labels), began_ns, now_ns, sample.value)


def _histograms(family: Family, began_ns: int, now_ns: int) -> Iterator[HistogramDataPoint]:
    for labels, samples in _by_labels(family.samples).items():
        bounds = [(float(s.labels["le"]), int(s.value)) for s in samples if "le" in s.labels]
        totals = [0, *(total for _, total in sorted(bounds))]
        sums = [s.value for s in samples if s.name == f"{family.name}_sum"]
        yield HistogramDataPoint(
            attributes=_attributes(dict(labels)),
            start_time_unix_nano=began_ns,
            time_unix_nano=now_ns,
            count=totals[-1],
            sum=sums[0] if sums else 0.0,
            bucket_counts=[high - low for low, high in pairwise(totals)],
            explicit_bounds=[bound for bound, _ in sorted(bounds) if bound != math.inf],
            min=_UNKNOWN,
            max=_UNKNOWN,
        )


def _by_labels(samples: Iterable[Sample]) -> dict[Labels, list[Sample]]:
    """A histogram's samples by their labels, but for the bucket's bound."""
    found: dict[Labels, list[Sample]] = {}
    for sample in samples:
        labels = tuple((name, value) for name, value in sample.labels.items() if name != "le")
        found.setdefault(labels, []).append(sample)
    return found


def _attributes(labels: Mapping[str, str]) -> dict[str, str]:
    return {_CONVENTION_LABELS.get(name, name): value for name, value in labels.items()}
