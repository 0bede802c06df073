"""The requests that wait or run, found by their ids and cancelled from outside."""

import math
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from core.errors import Cancelled, DeadlineExceeded, RequestNotFound
from core.messages import StopReason
from gateway.backend import TokenStream
from gateway.time_limit import TimeLimit

T = TypeVar("T")


class RunningRequest:
    """One request from its arrival to its end. `cancel` ends whatever it waits for."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.cancelled = False
        # Prompt and answer, as far as they are known.
        self.num_tokens = 0
        self._stream: TokenStream | None = None
        self._limit = TimeLimit()

    @property
    def begun(self) -> bool:
        """Whether its first token has come."""
        return self._stream is not None

    def begin(self, stream: TokenStream) -> None:
        """The first token is there."""
        self._stream = stream

    def cancel(self) -> None:
        """Ends the request: its job at once, its stream with Cancelled. Idempotent."""
        self.cancelled = True
        if self._stream is not None:
            self._stream.stop(StopReason.CANCELLED)
        self._limit.expire()

    def close(self) -> None:
        """It waits for nothing any more."""
        self._limit.close()

    async def wait(self, result: Awaitable[T], *, until_s: float = math.inf) -> T:
        """The result, unless the request is cancelled first (Cancelled).

        `until_s` is on the event loop's clock; past it, DeadlineExceeded.
        """
        try:
            with self.waiting(until_s):
                return await result
        except TimeoutError:
            raise self.timed_out() from None

    def waiting(self, until_s: float) -> TimeLimit:
        """Around the next wait, of which TimeoutError is an end: `timed_out` says which.

        For what is awaited once a token, where a coroutine more is one too many.
        """
        # Cancelled already: the first wait inside is the last.
        return self._limit.until(0.0 if self.cancelled else until_s)

    def timed_out(self) -> Cancelled | DeadlineExceeded:
        """What a wait ended with that took too long, or was ended from outside."""
        if self.cancelled:
            return cancelled()
        return DeadlineExceeded("the request's time ran out")


class RunningRequests:
    """Every request of this gateway, by tenant and by either of its two ids."""

    def __init__(self) -> None:
        # A client may give one id to several requests at once; a cancellation means all of them.
        self._by_id: dict[tuple[str, str], set[RunningRequest]] = {}
        self._all: set[RunningRequest] = set()

    @contextmanager
    def entered(self, request: RunningRequest, *, tenant: str, label: str) -> Iterator[None]:
        """The request can be found, also by the client's own label, while the context lasts."""
        keys = {(tenant, request.request_id), (tenant, label)}
        self._all.add(request)
        for key in keys:
            self._by_id.setdefault(key, set()).add(request)
        try:
            yield
        finally:
            request.close()
            self._all.discard(request)
            for key in keys:
                self._by_id[key].discard(request)
                if not self._by_id[key]:
                    del self._by_id[key]

    def cancel(self, request_id: str, *, tenant: str) -> None:
        """Cancels the tenant's requests of this id. Raises RequestNotFound where there are none."""
        found = self._by_id.get((tenant, request_id))
        if not found:
            raise RequestNotFound("no request of that id waits or runs here")
        for request in found:
            request.cancel()

    def __iter__(self) -> Iterator[RunningRequest]:
        return iter(self._all)


def cancelled() -> Cancelled:
    """What a request that was cancelled ends with."""
    return Cancelled("the request was cancelled")
