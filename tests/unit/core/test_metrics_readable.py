"""Metrics as a collector gets them: the same instruments and numbers as a scrape's."""

import pytest
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, Summary

from core.metrics.readable import readable


@pytest.fixture
def registry():
    return CollectorRegistry()


def told(registry):
    data = readable(
        registry, Resource({}), InstrumentationScope("tandem"), began_ns=100, now_ns=200
    )
    (of_us,) = encode_metrics(data).resource_metrics
    return {metric.name: metric for metric in of_us.scope_metrics[0].metrics}


def attributes(point):
    return {each.key: each.value.string_value for each in point.attributes}


def test_a_counter_is_a_monotonic_sum_since_the_start(registry):
    Counter("tandem_requests", "Words.", ("reason",), registry=registry).labels("eos").inc(3)
    metric = told(registry)["tandem_requests"]
    (point,) = metric.sum.data_points
    assert metric.sum.is_monotonic and metric.sum.aggregation_temporality == 2
    assert (point.as_double, attributes(point)) == (3.0, {"reason": "eos"})
    assert (point.start_time_unix_nano, point.time_unix_nano) == (100, 200)
    assert metric.description == "Words."


def test_gauges_and_infos_are_gauges(registry):
    Gauge("vllm:kv_cache_usage_perc", "Words.", registry=registry).set(0.5)
    Info("tandem_build", "Words.", registry=registry).info({"version": "1"})
    metrics = told(registry)
    assert metrics["vllm:kv_cache_usage_perc"].gauge.data_points[0].as_double == 0.5
    (build,) = metrics["tandem_build"].gauge.data_points
    assert (build.as_double, attributes(build)) == (1.0, {"version": "1"})


def test_a_histogram_has_each_bucket_by_itself(registry):
    steps = Histogram("s_seconds", "Words.", ("kind",), buckets=(1, 2), registry=registry)
    for value in (0.5, 1.5, 1.75, 9):
        steps.labels("decode").observe(value)
    steps.labels("prefill").observe(0.25)
    metric = told(registry)["s_seconds"]
    decode, prefill = sorted(metric.histogram.data_points, key=lambda point: -point.count)
    assert (decode.count, decode.sum, list(decode.bucket_counts)) == (4, 12.75, [1, 2, 1])
    assert list(decode.explicit_bounds) == [1.0, 2.0]
    assert attributes(prefill) == {"kind": "prefill"}
    assert not decode.HasField("min") and not decode.HasField("max")
    assert metric.unit == "s"


def test_what_the_conventions_name_has_its_own_name_again(registry):
    labels = ("gen_ai_operation_name", "error_type")
    name = "gen_ai_server_request_duration_seconds"
    Histogram(name, "Words.", labels, registry=registry).labels("chat", "").observe(1)
    (metric,) = told(registry).values()
    assert metric.name == "gen_ai.server.request.duration"
    (point,) = metric.histogram.data_points
    assert set(attributes(point)) == {"gen_ai.operation.name", "error.type"}


def test_what_has_no_values_and_what_is_of_no_such_kind_is_left_out(registry):
    Counter("nothing_yet", "Words.", ("reason",), registry=registry)
    Summary("sums", "Words.", registry=registry).observe(1)
    assert told(registry) == {}
