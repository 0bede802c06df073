"""Our spans as OpenTelemetry's SDK has them: what its exporters take."""

from collections.abc import Iterator, Sequence

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util import BoundedList
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from core.telemetry.names import Attr
from core.telemetry.span import MAX_EVENTS, Span
from core.telemetry.trace import RequestTrace

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_FINE, _FAILED = Status(StatusCode.UNSET), Status(StatusCode.ERROR)


class Reader:
    """Makes spans readable, as those of one process."""

    def __init__(self, resource: Resource, scope: InstrumentationScope) -> None:
        self._resource = resource
        self._scope = scope

    def readable(self, traces: Sequence[RequestTrace]) -> list[ReadableSpan]:
        """Every span of traces that nobody changes any more."""
        return [span for trace in traces for span in self._spans(trace)]

    def _spans(self, trace: RequestTrace) -> Iterator[ReadableSpan]:
        assert trace.context is not None
        trace_id, offset_ns = int.from_bytes(trace.context.trace_id), trace.offset_ns
        for span in trace.spans:
            assert span.end_s is not None
            attributes = dict(span.attributes)
            if span.error is not None:
                attributes[Attr.ERROR_TYPE] = span.error
            yield ReadableSpan(
                name=span.name,
                context=_context(trace_id, span.span_id),
                parent=_parent(trace_id, span, trace),
                resource=self._resource,
                instrumentation_scope=self._scope,
                attributes=attributes,
                events=_events(span, offset_ns),
                links=[Link(_context(int.from_bytes(t), s)) for t, s in span.links],
                kind=SpanKind.SERVER if span.is_server else SpanKind.INTERNAL,
                status=_FINE if span.error is None else _FAILED,
                start_time=offset_ns + int(span.start_s * 1e9),
                end_time=offset_ns + int(span.end_s * 1e9),
            )


def _context(trace_id: int, span_id: bytes, *, is_remote: bool = False) -> SpanContext:
    return SpanContext(trace_id, int.from_bytes(span_id), is_remote, _SAMPLED)


def _parent(trace_id: int, span: Span, trace: RequestTrace) -> SpanContext | None:
    if not span.parent_id:
        return None
    assert trace.context is not None
    return _context(trace_id, span.parent_id, is_remote=span.parent_id == trace.context.span_id)


def _events(span: Span, offset_ns: int) -> Sequence[Event]:
    if not span.events:
        return ()
    events: BoundedList[Event] = BoundedList.from_seq(
        MAX_EVENTS,
        [
            Event(name, dict(attributes), offset_ns + int(at_s * 1e9))
            for name, at_s, attributes in span.events
        ],
    )
    events.dropped = span.num_dropped_events
    return events
