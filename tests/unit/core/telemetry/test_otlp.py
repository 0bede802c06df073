"""Spans as the collector reads them, and which collectors can be named."""

import logging

import pytest
import structlog
from opentelemetry.sdk.resources import Resource

from core.config import TelemetryConfig
from core.errors import ConfigError
from core.messages import WorkerRef
from core.telemetry.context import TraceContext
from core.telemetry.encoder import Encoder
from core.telemetry.names import Role
from core.telemetry.otlp import sdk_logs_are_ours
from core.telemetry.resource import resource_of
from core.telemetry.setup import tracing
from core.telemetry.span import MAX_EVENTS
from core.telemetry.trace import RequestTrace

ME = WorkerRef(name="decode-0", incarnation="abcd")
CONTEXT = TraceContext(b"t" * 16, b"p" * 8, True)
NOWHERE = "http://127.0.0.1:1"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)


def told_of(*traces):
    """What a collector gets."""
    encoder = Encoder(Resource({"service.name": "tandem-gateway"}), "tandem", "1.0")
    (of_us,) = encoder.request(traces).resource_spans
    return of_us


def test_a_span_arrives_as_it_was_written_down():
    trace = RequestTrace(CONTEXT, recording=True)
    trace.offset_ns = 10**18
    span = trace.serve("chat m", 1.5)
    span.set({"text": "a", "flag": True, "n": 3, "x": 0.5, "list": ("b", "c")})
    span.event("chunk", 1.75, {"n": 1})
    span.links.append((b"o" * 16, b"l" * 8))
    span.end(2.0, "internal")
    of_us = told_of(trace)
    assert of_us.resource.attributes[0].value.string_value == "tandem-gateway"
    scope = of_us.scope_spans[0].scope
    assert (scope.name, scope.version) == ("tandem", "1.0")
    (told,) = of_us.scope_spans[0].spans
    assert (told.trace_id, told.parent_span_id, told.name) == (b"t" * 16, b"p" * 8, "chat m")
    assert told.kind == told.SPAN_KIND_SERVER
    assert told.start_time_unix_nano == 10**18 + 1_500_000_000
    assert told.end_time_unix_nano == 10**18 + 2_000_000_000
    values = {each.key: each.value for each in told.attributes}
    assert values["text"].string_value == "a" and values["flag"].bool_value
    assert values["flag"].WhichOneof("value") == "bool_value"
    assert (values["n"].int_value, values["x"].double_value) == (3, 0.5)
    assert [each.string_value for each in values["list"].array_value.values] == ["b", "c"]
    assert values["error.type"].string_value == "internal"
    assert told.status.code == told.status.STATUS_CODE_ERROR
    assert told.events[0].time_unix_nano == 10**18 + 1_750_000_000
    assert told.links[0].span_id == b"l" * 8


def test_what_hangs_under_another_processs_span_says_so():
    trace = RequestTrace(CONTEXT, recording=True)
    trace.serve("chat m", 1.0).end(3.0)
    trace.add("render", 1.0, 2.0)
    server, render = told_of(trace).scope_spans[0].spans
    assert render.parent_span_id == server.span_id
    remote = 0x200  # SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK
    assert server.flags & remote and not render.flags & remote


def test_events_that_were_too_many_are_counted():
    trace = RequestTrace(CONTEXT, recording=True)
    span = trace.begin("decode", 1.0)
    for i in range(MAX_EVENTS + 3):
        span.event("tokens", 2.0, {"n": i})
    span.end(3.0)
    (told,) = told_of(trace).scope_spans[0].spans
    assert (len(told.events), told.dropped_events_count) == (MAX_EVENTS, 3)


def traces(**settings):
    with tracing(TelemetryConfig(**settings), Role.DECODE_WORKER, ME) as tracer:
        trace = tracer.request(None)
        return trace.recording, trace.sampled


@pytest.mark.parametrize("endpoint", ["collector:4317", "ftp://x", "http://", "http://[x"])
def test_an_endpoint_that_is_none_is_refused_by_name(endpoint):
    with pytest.raises(ConfigError, match=r"telemetry\.otlp_endpoint"):
        traces(otlp_endpoint=endpoint)


@pytest.mark.parametrize(
    "name, value, named",
    [
        ("PROTOCOL", "http/protobuf", "PROTOCOL"),
        ("TIMEOUT", "soon", "TIMEOUT"),
        ("COMPRESSION", "zip", "COMPRESSION"),
        ("TRACES_CERTIFICATE", "/nowhere/ca.pem", "/nowhere/ca.pem"),
    ],
)
def test_a_variable_that_is_not_served_is_refused_by_name(monkeypatch, name, value, named):
    monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{name}", value)
    with pytest.raises(ConfigError, match=named):
        traces(otlp_endpoint=NOWHERE)


def test_nobody_traces_unless_asked_to(monkeypatch):
    assert traces() == (False, False)
    assert traces(otlp_endpoint=NOWHERE) == (True, True)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", NOWHERE)
    assert traces() == (True, True)
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert traces(otlp_endpoint=NOWHERE) == (False, False)


def test_the_standard_sampler_is_used_where_no_share_is_set(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", NOWHERE)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    assert traces() == (True, False)
    assert traces(sample_ratio=1.0) == (True, True)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    assert traces() == (True, False)
    for wrong in ("2", "many"):
        monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", wrong)
        with pytest.raises(ConfigError, match="OTEL_TRACES_SAMPLER"):
            traces()


def test_each_role_is_a_service_of_its_own(monkeypatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "prod")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deploy=eu%20west,x")
    told = resource_of(Role.PREFILL_WORKER, ME).attributes
    assert told["service.name"] == "prod-prefill-worker"
    assert told["service.namespace"] == "prod"
    assert told["service.instance.id"] == "decode-0/abcd"
    assert told["deploy"] == "eu west"
    assert told["telemetry.sdk.name"] == "opentelemetry"


def test_errors_of_the_sdk_are_lines_of_our_log():
    with structlog.testing.capture_logs() as lines, sdk_logs_are_ours():
        logging.getLogger("opentelemetry.exporter").error("no %s", "luck")
        logging.getLogger("opentelemetry.exporter").warning("trying again")
    logging.getLogger("opentelemetry.exporter").debug("nobody listens")
    assert [(line["event"], line["why"]) for line in lines] == [("opentelemetry", "no luck")]
