"""Whether this gateway can serve a request now, and if not why."""

import asyncio
from collections.abc import AsyncIterator


class Readiness:
    """Said by who knows, read by who is asked. Nothing is ready before it is said to be."""

    def __init__(self) -> None:
        self._not_ready: str | None = "the gateway is starting"
        self._in_part: str | None = None
        self._news = asyncio.Event()

    def say(self, not_ready: str | None, *, in_part: str | None = None) -> None:
        """Why no request can be served; None where one can. `in_part`: why not every one."""
        if (not_ready, in_part) != (self._not_ready, self._in_part):
            self._not_ready, self._in_part = not_ready, in_part
            news, self._news = self._news, asyncio.Event()
            news.set()

    def __call__(self) -> tuple[bool, str]:
        """Whether a request can be served, and if not every one why."""
        return self._not_ready is None, self._not_ready or self._in_part or ""

    def not_ready(self) -> str | None:
        """Why no request can be served."""
        return self._not_ready

    async def changes(self) -> AsyncIterator[bool]:
        """Whether a request can be served: now, and again after each change, for ever."""
        while True:
            news = self._news
            yield self._not_ready is None
            await news.wait()
