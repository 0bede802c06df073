"""What every HTTP request passes first: it gets an id and an access-log line, and shows its key."""

import math

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from core.errors import InvalidRequest, Unauthenticated
from core.telemetry.context import HEADER, RESPONSE_HEADER
from core.telemetry.names import Attr
from core.telemetry.tracer import NO_TRACER, Tracer
from gateway import request_trace
from gateway.auth import Authenticator
from gateway.certificates import SCOPE_NAMES
from gateway.http_errors import error_response
from gateway.limits import Allowance
from gateway.recent import RecentRequests
from gateway.request_record import RequestRecord, begin, checked_id, current, explained

HEALTH_PATHS = frozenset({"/healthz", "/readyz"})
REQUEST_ID = "x-request-id"
EXPLAIN = "x-tandem-explain"
_CLIENT_LEFT = 499
_SERVER_FAULT = 500
_API_KEY = "api-key"  # how Azure's clients send it


class RequestGate:
    """ASGI middleware, the outermost. The client's own request id is echoed where it is fit to be.

    Health checks are logged at debug level: they come every second.
    """

    def __init__(
        self, app: ASGIApp, tracer: Tracer = NO_TRACER, recent: RecentRequests | None = None
    ) -> None:
        self._app = app
        self._tracer = tracer
        self._recent = recent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord(method=scope["method"], path=scope["path"])
        begin(record)
        headers = Headers(scope=scope)
        record.explain = headers.get(EXPLAIN) == "1"
        if (operation := request_trace.HTTP_OPERATIONS.get(record.path)) is not None:
            request_trace.begin(
                self._tracer,
                record,
                operation,
                headers.get(HEADER),
                {Attr.HTTP_METHOD: record.method, Attr.HTTP_PATH: record.path},
            )
        app = self._app
        try:
            if (label := headers.get(REQUEST_ID)) is not None:
                record.request_id = checked_id(label)
        except InvalidRequest as error:
            app = error_response(error)
        status = _CLIENT_LEFT

        async def marking_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                _mark(MutableHeaders(raw=message["headers"]), record)
            await send(message)

        known = {"request_id": record.request_id}
        if (trace_id := record.trace.trace_id) is not None:
            known["trace_id"] = trace_id
        with structlog.contextvars.bound_contextvars(**known):
            try:
                await app(scope, receive, marking_send)
            finally:
                fault = str(status) if status >= _SERVER_FAULT else None
                request_trace.end(self._tracer, record, {Attr.HTTP_STATUS: status}, fault=fault)
                record.log(status, quiet=scope["path"] in HEALTH_PATHS)
                if self._recent is not None:
                    self._recent.add(record, status)


class KeyCheck:
    """ASGI middleware: nothing but health is answered without a caller's key, not even a 404."""

    def __init__(self, app: ASGIApp, authenticator: Authenticator) -> None:
        self._app = app
        self._authenticator = authenticator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http" and scope["path"] not in HEALTH_PATHS:
            headers = Headers(scope=scope)
            try:
                current().caller = self._authenticator.caller(
                    _only(headers, "authorization"),
                    _only(headers, _API_KEY),
                    scope.get("extensions", {}).get(SCOPE_NAMES, {}).get("names", ()),
                )
            except Unauthenticated as error:
                app = error_response(error)
        await app(scope, receive, send)


def _only(headers: Headers, name: str) -> str | None:
    """The value of a header that must not come twice."""
    values = headers.getlist(name)
    if len(values) > 1:
        raise Unauthenticated(f"the header {name} stands twice")
    return values[0] if values else None


def _mark(headers: MutableHeaders, record: RequestRecord) -> None:
    headers.setdefault(REQUEST_ID, record.request_id)
    if (why := explained(record)) is not None:
        headers[EXPLAIN] = why
    if trace_context := record.trace.header():
        headers[RESPONSE_HEADER] = trace_context
    for allowance in record.allowances:
        kind = allowance.quota.resource
        headers[f"x-ratelimit-limit-{kind}"] = str(allowance.quota.per_minute)
        headers[f"x-ratelimit-remaining-{kind}"] = str(allowance.remaining)
        headers[f"x-ratelimit-reset-{kind}"] = reset_in_words(allowance)


def reset_in_words(allowance: Allowance) -> str:
    """As OpenAI's clients read it: 80ms, 6s, 1m2s."""
    ms = math.ceil(allowance.reset_s * 1000)
    if ms < 1000:
        return f"{ms}ms"
    minutes, seconds = divmod(math.ceil(ms / 1000), 60)
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"
