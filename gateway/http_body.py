"""Reads a request's body within bounds."""

import asyncio
import contextlib

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from core.errors import BodyTooLarge
from gateway.http_errors import HttpRefusal

_BODY_TIMEOUT_S = 60.0
# How much longer a client that was refused may go on sending, so that it gets to read why.
_LINGER_S = 2.0
_LINGER_BYTES = 64 * 2**20


async def read_body(request: Request, *, max_bytes: int) -> bytes:
    """The body, of at most `max_bytes`; no more than that is ever held.

    Raises BodyTooLarge as soon as the bound is passed, whatever Content-Length says, and
    HttpRefusal for a body that is not JSON in UTF-8, is compressed, or does not come in time.
    Starlette's ClientDisconnect passes through.
    """
    _check_head(request, max_bytes)
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            async for chunk in request.stream():
                size += len(chunk)
                if size > max_bytes:
                    raise _too_large(max_bytes)
                chunks.append(chunk)
    except TimeoutError:
        raise HttpRefusal(408, "request_timeout", "the body did not arrive in time") from None
    return b"".join(chunks)


def _check_head(request: Request, max_bytes: int) -> None:
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise HttpRefusal(
            415, "unsupported_media_type", "Content-Encoding: compressed bodies are not accepted"
        )
    kind, _, parameters = request.headers.get("content-type", "").lower().partition(";")
    kind = kind.strip()
    charset = parameters.partition("charset=")[2].split(";")[0].strip(' "')
    if kind not in ("", "application/json") and not kind.endswith("+json"):
        raise HttpRefusal(415, "unsupported_media_type", "Content-Type must be application/json")
    if charset not in ("", "utf-8", "utf8", "us-ascii"):
        raise HttpRefusal(415, "unsupported_media_type", "Content-Type: only UTF-8 is accepted")
    length = request.headers.get("content-length", "")
    # int() of a client's digits is quadratic in their number
    if length.isdecimal() and (len(length) > 18 or int(length) > max_bytes):
        raise _too_large(max_bytes)


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {max_bytes} bytes")


class LastWords(Response):
    """Answers while the client still sends, and only then closes.

    Closing at once would reset the connection, and the answer would be lost with it. What arrives
    is thrown away, for a bounded time.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                await _discard(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _discard(receive: Receive) -> None:
    size = 0
    while size < _LINGER_BYTES:
        message = await receive()
        size += len(message.get("body", b""))
        if message["type"] == "http.disconnect" or not message.get("more_body"):
            return
