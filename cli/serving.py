"""Serves in the foreground: until a signal, or until what is served cannot be kept up."""

import asyncio
import signal
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self, TypeVar

from core.log import AS_CONFIGURED, EVERYTHING


class Served(Protocol):
    """A cluster, or one process of one."""

    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
    async def wait(self) -> None: ...
    def kill(self) -> None: ...
    def pass_on(self, number: signal.Signals) -> None: ...


S = TypeVar("S", bound=Served)


async def serve_until_told(served: S, *, announce: Callable[[S], None] | None = None) -> None:
    """Until SIGINT or SIGTERM; a second one ends everything at once.

    Raises TandemError where it cannot be kept up. `announce` is called once it is entered.
    """
    serving = asyncio.current_task()
    assert serving is not None
    asked_to_stop = False

    def on_signal() -> None:
        nonlocal asked_to_stop
        if asked_to_stop:
            served.kill()
        else:
            asked_to_stop = True
            print("tandem: stopping (again: at once)", file=sys.stderr, flush=True)
            serving.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    for number in (EVERYTHING, AS_CONFIGURED):
        loop.add_signal_handler(number, served.pass_on, number)
    try:
        async with served:
            if announce is not None:
                announce(served)
            await served.wait()
    except asyncio.CancelledError:
        if not asked_to_stop:
            raise
