"""A collector for tests and measurements: takes OTLP over gRPC, keeps spans and metrics."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

_SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"
_METRICS = "opentelemetry.proto.collector.metrics.v1.MetricsService"


@dataclass(frozen=True)
class ReceivedSpan:
    """One span as it arrived. Ids are hexadecimal; times are Unix nanoseconds."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    start_ns: int
    end_ns: int
    failed: bool
    attributes: dict[str, Any] = field(repr=False)
    # (name, attributes) in order.
    events: list[tuple[str, dict[str, Any]]] = field(repr=False)
    # (trace id, span id).
    links: list[tuple[str, str]] = field(repr=False)

    @property
    def duration_s(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


class OtlpReceiver:
    """`with OtlpReceiver() as receiver:` listens on a free port of this machine."""

    def __init__(self) -> None:
        self._spans: list[ReceivedSpan] = []
        # (service, message) of each metric, in the order they came.
        self.metrics: list[tuple[str, Any]] = []
        self._lock = threading.Lock()
        # Processor seconds of the threads that took spans in.
        self.busy_s = 0.0
        self._server = grpc.server(ThreadPoolExecutor(4))
        method = grpc.unary_unary_rpc_method_handler(
            self._export,
            request_deserializer=ExportTraceServiceRequest.FromString,
            response_serializer=ExportTraceServiceResponse.SerializeToString,
        )
        metrics = grpc.unary_unary_rpc_method_handler(
            self._export_metrics,
            request_deserializer=ExportMetricsServiceRequest.FromString,
            response_serializer=ExportMetricsServiceResponse.SerializeToString,
        )
        self._server.add_generic_rpc_handlers(
            [
                grpc.method_handlers_generic_handler(_SERVICE, {"Export": method}),
                grpc.method_handlers_generic_handler(_METRICS, {"Export": metrics}),
            ]
        )
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.stop(None).wait()

    def _export(
        self, request: ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> ExportTraceServiceResponse:
        began_s = time.thread_time()
        came = [
            _span(span, _values(of.resource.attributes)["service.name"])
            for of in request.resource_spans
            for scope in of.scope_spans
            for span in scope.spans
        ]
        with self._lock:
            self._spans += came
            self.busy_s += time.thread_time() - began_s
        return ExportTraceServiceResponse()

    def _export_metrics(
        self, request: ExportMetricsServiceRequest, context: grpc.ServicerContext
    ) -> ExportMetricsServiceResponse:
        self.metrics += [
            (_values(of.resource.attributes)["service.name"], metric)
            for of in request.resource_metrics
            for scope in of.scope_metrics
            for metric in scope.metrics
        ]
        return ExportMetricsServiceResponse()

    def wait_for_metrics(self, timeout_s: float = 30.0) -> None:
        """Until some have come. Raises TimeoutError."""
        end_s = time.monotonic() + timeout_s
        while not self.metrics:
            if time.monotonic() > end_s:
                raise TimeoutError("no metrics came")
            time.sleep(0.05)

    def spans(self, trace_id: str | None = None) -> list[ReceivedSpan]:
        """What has come, of one trace or of all."""
        with self._lock:
            return [each for each in self._spans if trace_id in (None, each.trace_id)]

    def wait_for(
        self,
        trace_id: str,
        enough: Callable[[list[ReceivedSpan]], bool],
        *,
        timeout_s: float = 60.0,
    ) -> list[ReceivedSpan]:
        """The spans of a trace once they are enough; what has come where they never are."""
        end_s = time.monotonic() + timeout_s
        while True:
            found = self.spans(trace_id)
            if enough(found) or time.monotonic() > end_s:
                return found
            time.sleep(0.05)


def _span(span: Any, service: str) -> ReceivedSpan:
    return ReceivedSpan(
        service=service,
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        kind=span.kind,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        failed=span.status.code == span.status.STATUS_CODE_ERROR,
        attributes=_values(span.attributes),
        events=[(event.name, _values(event.attributes)) for event in span.events],
        links=[(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)
