"""How a worker leaves: it takes nothing new, sees to what it has, and says when it is empty.

Asked for by SIGTERM, or before that by whoever is about to remove the worker: POST /drain on its
admin server begins it, GET /drain tells how far it is.
"""

import asyncio
from typing import Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from core.registration import Registration

# Within which a step ends and gateways are told that their requests were given up.
_GIVE_UP_S = 1.0
_JSON = "application/json"


class Leaver(Protocol):
    """`drained` returns once nothing is left and refuses what is new; `hand_over` gives up what
    runs, so that it goes on at other workers."""

    async def drained(self) -> None: ...
    def hand_over(self) -> object: ...


class Drain:
    """One worker's leaving. `asked` is set once somebody wants it."""

    def __init__(self, worker: Leaver, registration: Registration, *, timeout_s: float) -> None:
        self._worker = worker
        self._registration = registration
        self._timeout_s = timeout_s
        self.asked = asyncio.Event()
        self._over = False

    async def run(self) -> None:
        """Until nothing is left, or the time is over."""
        self.asked.set()
        drained = asyncio.create_task(self._worker.drained())
        await asyncio.sleep(0)  # it is draining now
        self._registration.report_now()
        try:
            await asyncio.wait({drained}, timeout=self._timeout_s)
            if not drained.done():
                self._worker.hand_over()
                await asyncio.wait({drained}, timeout=_GIVE_UP_S)
        finally:
            drained.cancel()
        self._over = True

    @property
    def routes(self) -> list[BaseRoute]:
        """GET and POST /drain."""
        return [Route("/drain", self._tell), Route("/drain", self._begin, methods=["POST"])]

    async def _tell(self, request: Request) -> Response:
        return JSONResponse({"draining": self.asked.is_set(), "drained": self._over})

    async def _begin(self, request: Request) -> Response:
        # A web page cannot ask for this type without asking the server first, which says no.
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _JSON:
            return JSONResponse({"error": f"content-type must be {_JSON}"}, 415)
        self.asked.set()
        return JSONResponse({"draining": True, "drained": self._over}, 202)
