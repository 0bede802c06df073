"""Server-sent events, as the WHATWG specification frames them, written to one ASGI connection."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from starlette.types import Send

from core.errors import SlowReader
from gateway.time_limit import TimeLimit

# JSON escapes every control character but these, at which some clients' line readers split.
_LINE_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}
_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
WRITE_TIMEOUT_S = 30.0
DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keepalive\n\n"


def sse_event(value: Mapping[str, Any], event_id: str | None = None) -> bytes:
    """One event with one line of JSON, and an id where there is one."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    named = "" if event_id is None else f"id: {event_id}\n"
    return f"{named}data: {text.translate(_LINE_ENDS)}\n\n".encode()


class SlowClient(SlowReader):
    """The client takes nothing of what was sent."""


class SseWriter:
    """One response. The head goes out with the first bytes, so until then it can still be an error.

    `keep_alive` writes a comment whenever nothing was written for an interval; it belongs in a
    task beside the one that writes events.
    """

    def __init__(self, send: Send, headers: Mapping[str, str], *, keepalive_s: float) -> None:
        self._send = send
        self._headers = {**_HEADERS, **headers}
        self._keepalive_s = keepalive_s
        self._lock = asyncio.Lock()
        self._limit = TimeLimit()
        self._quiet = True
        self.started = False

    async def write(self, data: bytes) -> None:
        """Raises SlowClient where the connection takes nothing for WRITE_TIMEOUT_S."""
        async with self._lock:  # two writers: events and keepalives
            self._quiet = False
            if not self.started:
                self.started = True
                await self._send(self._head())
            await self._send_body(data, more=True)

    async def close(self) -> None:
        """Ends the response after what was written."""
        async with self._lock:
            await self._send_body(b"", more=False)

    def release(self) -> None:
        """Nothing is written any more, whether or not the response was closed."""
        self._limit.close()

    async def keep_alive(self) -> None:
        """Runs until it is cancelled."""
        while True:
            self._quiet = True
            await asyncio.sleep(self._keepalive_s)
            if self._quiet:
                await self.write(KEEPALIVE)

    async def _send_body(self, data: bytes, *, more: bool) -> None:
        try:
            with self._limit.within(WRITE_TIMEOUT_S):
                await self._send({"type": "http.response.body", "body": data, "more_body": more})
        except TimeoutError:
            raise SlowClient("the client took nothing for too long") from None

    def _head(self) -> dict[str, Any]:
        headers = [
            (name.encode(), value.encode("latin-1")) for name, value in self._headers.items()
        ]
        return {"type": "http.response.start", "status": 200, "headers": headers}
