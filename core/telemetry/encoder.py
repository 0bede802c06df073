"""Our spans as OTLP has them: the protobuf messages that collectors take.

Messages are filled where they stand, since protobuf copies a message that is put into another one.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope
from opentelemetry.proto.resource.v1 import resource_pb2
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans, SpanFlags, Status
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan
from opentelemetry.sdk.resources import Resource

from core.telemetry.names import Attr
from core.telemetry.span import Span
from core.telemetry.trace import RequestTrace

_NS_PER_S = 1e9
_LOCAL = SpanFlags.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK
_REMOTE = _LOCAL | SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK


class Encoder:
    """Encodes the spans of one process, as those of this resource and scope."""

    def __init__(self, resource: Resource, scope: str, version: str) -> None:
        self._resource = resource_pb2.Resource()
        _describe(self._resource.attributes, resource.attributes)
        self._schema_url = resource.schema_url
        self._scope = InstrumentationScope(name=scope, version=version)

    def request(self, traces: Iterable[RequestTrace]) -> ExportTraceServiceRequest:
        """Every span of traces that nobody changes any more."""
        request = ExportTraceServiceRequest()
        of_us = request.resource_spans.add(resource=self._resource, schema_url=self._schema_url)
        of_scope = of_us.scope_spans.add(scope=self._scope)
        for trace in traces:
            _tell(of_scope, trace)
        return request


def _tell(of_scope: ScopeSpans, trace: RequestTrace) -> None:
    assert trace.context is not None
    trace_id, above = trace.context.trace_id, trace.context.span_id
    for span in trace.spans:
        assert span.end_s is not None
        told = of_scope.spans.add(
            trace_id=trace_id,
            span_id=span.span_id,
            parent_span_id=span.parent_id,
            name=span.name,
            kind=OtlpSpan.SPAN_KIND_SERVER if span.is_server else OtlpSpan.SPAN_KIND_INTERNAL,
            start_time_unix_nano=trace.offset_ns + int(span.start_s * _NS_PER_S),
            end_time_unix_nano=trace.offset_ns + int(span.end_s * _NS_PER_S),
            flags=_REMOTE if span.parent_id and span.parent_id == above else _LOCAL,
            dropped_events_count=span.num_dropped_events,
        )
        _describe(told.attributes, span.attributes)
        if span.error is not None:
            told.status.code = Status.STATUS_CODE_ERROR
            told.attributes.add(key=Attr.ERROR_TYPE, value=AnyValue(string_value=span.error))
        _tell_events(told, span, trace.offset_ns)
        for linked_trace_id, span_id in span.links:
            told.links.add(trace_id=linked_trace_id, span_id=span_id, flags=_LOCAL)


def _tell_events(told: OtlpSpan, span: Span, offset_ns: int) -> None:
    for name, at_s, attributes in span.events:
        event = told.events.add(name=name, time_unix_nano=offset_ns + int(at_s * _NS_PER_S))
        _describe(event.attributes, attributes)


def _describe(told: Any, attributes: Mapping[str, Any]) -> None:
    for key, value in attributes.items():
        _fill(told.add(key=key).value, value)


def _fill(told: AnyValue, value: Any) -> None:
    match value:
        case str():
            told.string_value = value
        case bool():  # is an int, too
            told.bool_value = value
        case int():
            told.int_value = value
        case float():
            told.double_value = value
        case Sequence():
            told.array_value.SetInParent()
            for each in value:
                _fill(told.array_value.values.add(), each)
        case _:
            raise TypeError(f"an attribute cannot be a {type(value).__name__}")
