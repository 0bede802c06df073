"""HTTP/1.1 on one connection, with the bounds and the answers that uvicorn does not have."""

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from core.errors import InvalidRequest
from gateway.certificates import SCOPE_NAMES, names_in_ssl
from gateway.http_errors import HttpRefusal, error_response
from gateway.http_gate import REQUEST_ID
from gateway.request_record import RequestRecord, checked_id

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 128
_HEAD_TIMEOUT_S = 20.0
# Longer than a route waits for a body (`gateway.http_body`): for what no route reads any more.
_BODY_TIMEOUT_S = 90.0
_LINGER_S = 1.0
# A chunk of one byte takes six. Chunk extensions and trailers, which nobody reads, have no bound of
# their own, and the parser holds a trailer in memory.
_MAX_FRAMING_RATIO = 8
_MAX_FRAMING_BYTES = 2**20
# What a request says of a protocol that it would rather speak. We speak this one.
_UPGRADE_HEADERS = frozenset({b"upgrade", b"connection", b"http2-settings"})


class BoundedHttpProtocol(HttpToolsProtocol):
    """Refuses what is too large (431), too slow (408) or not HTTP (400), in OpenAI's shape.

    A head is held in memory up to MAX_HEAD_BYTES and one read. Its time counts from the connection,
    or from the first byte of a later request; a body's time counts from the end of its head.

    A request that offers another protocol (`Upgrade: h2c` of curl and Java's HttpClient) is
    answered as if it did not, as RFC 9110 7.8 allows.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._reading_head = True
        # Of the present body: what came in all, and what of it is body.
        self._message_bytes = 0
        self._body_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._refused = False
        # The head without its offer, to be parsed in its place.
        self._without_offer: bytes | None = None
        # In the certificate that the client showed.
        self._client_names: tuple[str, ...] = ()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if certificate := transport.get_extra_info("peercert"):
            self._client_names = names_in_ssl(certificate)
        self._start_timer(_HEAD_TIMEOUT_S, "head")

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._reading_head:
            self._head_bytes += len(data)
            self._start_timer(_HEAD_TIMEOUT_S, "head")
        else:
            self._message_bytes += len(data)
        self._unset_keepalive_if_required()
        self._feed(data)
        if self._reading_head:
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(_too_large())
        elif self._message_bytes > _MAX_FRAMING_BYTES + _MAX_FRAMING_RATIO * self._body_bytes:
            self._refuse(_not_http())

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            # The parser leaves what follows such a head to the other protocol.
            if self._without_offer is not None and not self._refused:
                head, self._without_offer = self._without_offer, None
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
                self._feed(head + data[offer.args[0] :])
        except httptools.HttpParserError:
            self._refuse(_not_http())

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self._refuse_head(
                HttpRefusal(
                    431, "headers_too_large", f"the request has more than {MAX_HEADERS} headers"
                )
            )

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > MAX_HEAD_BYTES:
            self._refuse_head(_too_large())
        if self.parser.get_method() == b"CONNECT":
            self._refuse_head(HttpRefusal(405, "method_not_allowed", "this server is no proxy"))
        if self.parser.should_upgrade():
            self._without_offer = self._rewritten_head()
            return
        self._reading_head = False
        self._message_bytes = self._body_bytes = 0
        self._stop_timer()
        self._start_timer(_BODY_TIMEOUT_S, "body")
        self.scope["extensions"] = {SCOPE_NAMES: {"names": self._client_names}}
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._without_offer is not None:
            return
        super().on_message_complete()
        self._stop_timer()
        self._reading_head, self._head_bytes = True, 0

    def _rewritten_head(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        for name, value in self.headers:
            if name not in _UPGRADE_HEADERS:
                lines.append(b"%s: %s" % (name, value))
            elif name == b"connection" and b"close" in value.lower():
                lines.append(b"connection: close")
        return b"\r\n".join([*lines, b"", b""])

    def _start_timer(self, timeout_s: float, what: str) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(timeout_s, self._refuse, _too_slow(what))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse_head(self, error: HttpRefusal) -> None:
        """From within the parser: raising ends the parsing."""
        self._refuse(error)
        raise ValueError(error.code)

    def _refuse(self, error: HttpRefusal) -> None:
        """Answers and closes.

        Where an earlier request of the connection still waits for its answer, or this one has begun
        to get one, it is broken off instead: an answer would be taken for another's. Closing while
        the client still sends would reset the connection and lose the answer, so the last words
        linger; whatever arrives then is thrown away.
        """
        self._stop_timer()
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        if self._is_anothers_turn():
            self.transport.close()
            return
        if not self._reading_head:
            self.cycle.disconnected = True  # to whoever still reads the body
            self.cycle.message_event.set()
        record = self._record()
        response = error_response(error, {"connection": "close", REQUEST_ID: record.request_id})
        head = [STATUS_LINE[error.status]]
        head += [name + b": " + value + b"\r\n" for name, value in response.raw_headers]
        self.transport.write(b"".join([*head, b"\r\n", bytes(response.body)]))
        if self.transport.can_write_eof():  # over TLS there is no such thing
            self.transport.write_eof()
        self._timer = self.loop.call_later(_LINGER_S, self.transport.close)
        if self._reading_head:  # else the application saw the request, and logs it
            record.log(error.status)

    def _is_anothers_turn(self) -> bool:
        if self._reading_head:
            return self.cycle is not None and not self.cycle.response_complete
        return self.cycle.response_started or bool(self.pipeline)

    def _record(self) -> RequestRecord:
        """What could be read of the request that is refused."""
        record = RequestRecord(method="?", path=getattr(self, "url", b"").decode("latin-1"))
        for name, value in self.headers or ():
            if name == REQUEST_ID.encode():
                try:
                    record.request_id = checked_id(value.decode("latin-1"))
                except InvalidRequest:
                    break
        return record


def _not_http() -> HttpRefusal:
    return HttpRefusal(400, "invalid_request", "the request is not valid HTTP/1.1")


def _too_large() -> HttpRefusal:
    return HttpRefusal(
        431, "headers_too_large", f"the request's head is larger than {MAX_HEAD_BYTES} bytes"
    )


def _too_slow(what: str) -> HttpRefusal:
    return HttpRefusal(408, "request_timeout", f"the request's {what} did not arrive in time")
