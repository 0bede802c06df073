"""Bounds many short waits of one task with one timer.

`asyncio.timeout` makes a timer for each wait and drops it again: some microseconds, which is a
tenth of what the gateway may spend on a token, and a token is waited for and then written. Here a
wait costs the setting of a few attributes; the timer is only looked at when it fires.
"""

import asyncio
import math
from types import TracebackType


class TimeLimit:
    """A limit on what its task awaits inside of `with`; TimeoutError where that takes longer.

    One wait at a time, over and over. `close` belongs in a `finally`: a timer may still be set.
    """

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None
        self._cancelling = 0
        self._until_s = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._expired = False

    def within(self, limit_s: float) -> "TimeLimit":
        """The next wait may take this long."""
        return self.until(asyncio.get_running_loop().time() + limit_s)

    def until(self, at_s: float) -> "TimeLimit":
        """The next wait may last until then, by the event loop's clock."""
        self._until_s = at_s
        return self

    def expire(self) -> None:
        """Ends the present wait as though its time had run out; nothing where there is none."""
        if self._task is not None and not self._expired:
            self._expired = True
            self._task.cancel()

    def close(self) -> None:
        """No wait comes any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None and self._task is None
        self._task, self._cancelling, self._expired = task, task.cancelling(), False
        # A timer that is too early is mended when it fires; one that is too late is set anew.
        if self._timer is None or self._timer.when() > self._until_s:
            self._set_timer()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        task, self._task = self._task, None
        assert task is not None
        # As asyncio.timeout does: another's cancellation, come at the same time, is not swallowed.
        if self._expired and task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def _set_timer(self) -> None:
        self.close()
        if self._until_s < math.inf:
            self._timer = asyncio.get_running_loop().call_at(self._until_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._task is None:
            return  # the next wait sets it anew
        if asyncio.get_running_loop().time() < self._until_s:
            self._set_timer()
        else:
            self.expire()
