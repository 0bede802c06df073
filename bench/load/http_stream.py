"""One HTTP exchange whose response is read as it comes.

Its own small client, since the load must leave the machine to the server: on a stream of single
tokens a general client spends five times as long on each event (docs/benchmarks.md).
"""

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

import httptools

from core.errors import InvalidRequest, Unavailable

OnBody = Callable[[int, bytes, float], None]
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a server listens. `prefix` stands before every path; it has no slash at its end."""

    host: str
    port: int
    secure: bool
    prefix: str

    @classmethod
    def parse(cls, url: str) -> Self:
        """Of `http://host:8000`, with or without `/v1`. Raises InvalidRequest."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise InvalidRequest(f"{url} is not a URL: {error}", field="url") from error
        if parts.scheme not in _PORTS or not parts.hostname:
            raise InvalidRequest(f"{url} is not a URL of http or https", field="url")
        return cls(
            host=parts.hostname,
            port=port or _PORTS[parts.scheme],
            secure=parts.scheme == "https",
            prefix=parts.path.rstrip("/").removesuffix("/v1"),
        )

    @property
    def url(self) -> str:
        """As a person writes it."""
        scheme = "https" if self.secure else "http"
        return f"{scheme}://{self._netloc}{self.prefix}"

    def post(self, path: str, body: bytes, api_key: str | None) -> bytes:
        """A whole request."""
        head = [
            f"POST {self.prefix}{path} HTTP/1.1",
            f"Host: {self._netloc}",
            "Content-Type: application/json",
            "Accept: text/event-stream",
            f"Content-Length: {len(body)}",
            # A connection each: none is found closed by the server just as it is used again.
            "Connection: close",
        ]
        if api_key:
            head.append(f"Authorization: Bearer {api_key}")
        return "\r\n".join([*head, "", ""]).encode("latin-1") + body

    @property
    def _netloc(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


async def exchange(
    address: Address, request: bytes, on_body: OnBody, tls: ssl.SSLContext | None
) -> int:
    """Sends a request and reads the response to its end; gives its status.

    `on_body` gets the status, each piece of the body, and `time.perf_counter()` as it was when the
    piece arrived. Raises OSError where there is no connection, Unavailable where it is lost.
    """
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.create_connection(
        lambda: _Exchange(request, on_body, loop.create_future()),
        address.host,
        address.port,
        ssl=tls,
    )
    try:
        return await protocol.ended
    finally:
        transport.abort()


class _Exchange(asyncio.Protocol):
    """httptools calls the `on_` methods."""

    def __init__(self, request: bytes, on_body: OnBody, ended: asyncio.Future[int]) -> None:
        self.ended = ended
        self._request = request
        self._on_body = on_body
        self._parser = httptools.HttpResponseParser(self)
        self._arrived_s = 0.0
        self._ends_with_connection = False
        self._has_length = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._arrived_s = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(Unavailable(f"the response is not HTTP: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        if error is None and self._ends_with_connection:
            self.on_message_complete()
        self._fail(Unavailable(str(error) if error else "the server closed the connection"))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._has_length |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self._ends_with_connection = not self._has_length

    def on_body(self, body: bytes) -> None:
        self._on_body(self._parser.get_status_code(), body, self._arrived_s)

    def on_message_complete(self) -> None:
        if not self.ended.done():
            self.ended.set_result(self._parser.get_status_code())

    def _fail(self, error: Unavailable) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)
