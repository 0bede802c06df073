"""What every gRPC call passes first: it gets an id and an access-log line, and shows its key."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
import structlog

from core.errors import TandemError
from core.telemetry.context import HEADER, RESPONSE_HEADER
from core.telemetry.names import Attr
from core.telemetry.tracer import NO_TRACER, Tracer
from gateway import request_trace
from gateway.auth import Authenticator
from gateway.certificates import names_in_grpc
from gateway.grpc_errors import REQUEST_ID, abort
from gateway.recent import RecentRequests
from gateway.request_record import RequestRecord, begin, checked_id, explained

_HEALTH = "/grpc.health.v1.Health/"
_EXPLAIN = "x-tandem-explain"
# Those that OpenTelemetry's conventions count as a server's errors. A passed deadline may be the
# client's own; `request_trace.blamed` knows.
_SERVER_FAULTS = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context = grpc.aio.ServicerContext[Any, Any]
Details = grpc.HandlerCallDetails


class GrpcGate(grpc.aio.ServerInterceptor):
    """Echoes the request id as trailing metadata, and refuses whoever has no key.

    Health is answered without one, and its calls are logged at debug level.
    """

    def __init__(
        self,
        authenticator: Authenticator,
        tracer: Tracer = NO_TRACER,
        recent: RecentRequests | None = None,
    ) -> None:
        self._authenticator = authenticator
        self._end = _End(tracer, recent)
        self._tracer = tracer

    async def intercept_service(
        self,
        continuation: Callable[[Details], Awaitable["Handler | None"]],
        handler_call_details: Details,
    ) -> "Handler | None":
        method = handler_call_details.method
        # Metadata of these names may come twice; the first one is meant, as in HTTP/2 proxies.
        metadata: dict[str, str | bytes] = {}
        for key, value in handler_call_details.invocation_metadata or ():
            metadata.setdefault(key, value)
        record = RequestRecord(method="gRPC", path=method)
        record.explain = metadata.get(_EXPLAIN) == "1"
        begin(record)
        if (operation := request_trace.GRPC_OPERATIONS.get(method)) is not None:
            request_trace.begin(
                self._tracer,
                record,
                operation,
                _text(metadata, HEADER),
                {Attr.RPC_SYSTEM: "grpc", Attr.RPC_METHOD: method.removeprefix("/")},
            )
        handler: Handler | None
        # A certificate is shown once the call has begun.
        late: Authenticator | None = None
        try:
            if isinstance(label := metadata.get(REQUEST_ID), str):
                record.request_id = checked_id(label)
            if not method.startswith(_HEALTH):
                shown = (_text(metadata, "authorization"), _text(metadata, "api-key"))
                if self._authenticator.knows_certificates and shown == (None, None):
                    late = self._authenticator
                else:
                    record.caller = self._authenticator.caller(*shown)
        except TandemError as error:
            handler = grpc.unary_unary_rpc_method_handler(_refusal(error, record))
        else:
            handler = await continuation(handler_call_details)
        return _gated(handler, record, self._end, late)


def _text(metadata: dict[str, str | bytes], key: str) -> str | None:
    value = metadata.get(key)
    return value if isinstance(value, str) else None


def _refusal(error: TandemError, record: RequestRecord) -> Callable[[Any, Context], Awaitable[Any]]:
    async def refuse(request: Any, context: Context) -> Any:
        await abort(context, error, record.request_id)

    return refuse


@dataclass(frozen=True, slots=True)
class _End:
    """Who is told of a call's end."""

    tracer: Tracer
    recent: RecentRequests | None

    def __call__(self, record: RequestRecord, status: grpc.StatusCode) -> None:
        fault = status.name if status in _SERVER_FAULTS else None
        request_trace.end(self.tracer, record, {Attr.RPC_STATUS: status.name}, fault=fault)
        record.log(status.name, quiet=record.path.startswith(_HEALTH))
        if self.recent is not None:
            self.recent.add(record, status.name)


def _gated(
    handler: "Handler | None", record: RequestRecord, end: _End, late: Authenticator | None
) -> "Handler | None":
    """The handler with the record around it. gRPC answers None with UNIMPLEMENTED.

    `late` asks for the client's certificate before anything else is done.
    """
    if handler is None:
        record.log(grpc.StatusCode.UNIMPLEMENTED.name)
        return None
    name = next(
        name
        for name in ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
        if getattr(handler, name) is not None
    )
    behaviour = getattr(handler, name)
    make = getattr(grpc, f"{name}_rpc_method_handler")

    async def call(request: Any, context: Context) -> Any:
        with _logged(record, context, end):
            context.set_trailing_metadata(_trailing(record))
            await _certify(late, record, context)
            answer = await behaviour(request, context)
            _explain(record, context)
            return answer

    async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
        with _logged(record, context, end):
            context.set_trailing_metadata(_trailing(record))
            await _certify(late, record, context)
            async for response in behaviour(request, context):
                yield response
            _explain(record, context)

    if inspect.isasyncgenfunction(behaviour):
        gated: Any = stream
    elif inspect.iscoroutinefunction(behaviour):
        gated = call
    else:  # a service of gRPC's own that runs in a thread: it has no id to echo
        if late is not None:
            try:
                late.caller(None, None)
            except TandemError as error:
                return grpc.unary_unary_rpc_method_handler(_refusal(error, record))
        record.log(grpc.StatusCode.OK.name)
        return handler
    remade: Handler = make(gated, handler.request_deserializer, handler.response_serializer)
    return remade


async def _certify(late: Authenticator | None, record: RequestRecord, context: Context) -> None:
    """Finds the caller by the certificate. Ends the call where that is nobody."""
    if late is None:
        return
    try:
        record.caller = late.caller(None, None, names_in_grpc(context.auth_context()))
    except TandemError as error:
        await abort(context, error, record.request_id)


def _trailing(record: RequestRecord) -> tuple[tuple[str, str], ...]:
    trace_context = record.trace.header()
    traced = ((RESPONSE_HEADER, trace_context),) if trace_context else ()
    return ((REQUEST_ID, record.request_id), *traced)


def _explain(record: RequestRecord, context: Context) -> None:
    """Says in the trailing metadata why the request went where it did."""
    if (why := explained(record)) is not None:
        context.set_trailing_metadata((*_trailing(record), (_EXPLAIN, why)))


@contextmanager
def _logged(record: RequestRecord, context: Context, end: _End) -> Iterator[None]:
    status = grpc.StatusCode.OK
    # Not taken back: the task, and its context with it, ends with the call.
    structlog.contextvars.bind_contextvars(request_id=record.request_id)
    if record.trace.trace_id is not None:
        structlog.contextvars.bind_contextvars(trace_id=record.trace.trace_id)
    try:
        yield
    except (asyncio.CancelledError, GeneratorExit):
        left_s = context.time_remaining()
        late = left_s is not None and left_s <= 0
        status = grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.CANCELLED
        raise
    except Exception:
        status = grpc.StatusCode.UNKNOWN
        raise
    finally:
        told = context.code()  # what a handler set, also where it ended by raising
        end(record, told if isinstance(told, grpc.StatusCode) else status)
