"""What each transfer may write into a pool, and which of its bytes have come.

For the transports where this process does the writing, a closed window is proof: a piece lands
under the lock that closing takes, so nothing lands after `close` has returned. Pieces of a transfer
that is closed, unknown or of another attempt are stale, and so is one whose bytes came before.
"""

import asyncio
import bisect
import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence

from core.messages import TransferId
from kv_transfer.digest import Blocks


class _Window:
    def __init__(self, block_ids: Sequence[int], block_bytes: int) -> None:
        self.block_ids = tuple(block_ids)
        self.missing_bytes = len(self.block_ids) * block_bytes
        self.waiter: Callable[[], None] | None = None
        # Of each block, the spans that have come: [start, end), sorted, neither touching.
        self._spans: list[list[tuple[int, int]]] = [[] for _ in self.block_ids]

    def lacks(self, index: int, start: int, end: int) -> bool:
        """Whether the span lies in the window and none of its bytes has come."""
        if index >= len(self._spans):
            return False
        spans = self._spans[index]
        at = bisect.bisect_left(spans, (start, end))
        before_ends = at == 0 or spans[at - 1][1] <= start
        return before_ends and (at == len(spans) or end <= spans[at][0])

    def add(self, index: int, start: int, end: int) -> None:
        """Counts a span that it lacks."""
        spans = self._spans[index]
        self.missing_bytes -= end - start
        at = bisect.bisect_left(spans, (start, end))
        if at < len(spans) and spans[at][0] == end:
            end = spans.pop(at)[1]
        if at > 0 and spans[at - 1][1] == start:
            at -= 1
            start = spans.pop(at)[0]
        spans.insert(at, (start, end))


class Windows:
    """The windows of one pool. Any thread may call."""

    def __init__(self, pool: Blocks) -> None:
        """`pool` is uint8 [num_blocks, block_bytes]."""
        self._pool = pool
        self.block_bytes = int(pool.shape[1])
        self._lock = threading.Lock()  # guards the windows, and the pool against a late write
        self._windows: dict[TransferId, _Window] = {}
        self.num_stale = 0
        self.num_bytes = 0

    def open(self, transfer: TransferId, block_ids: Sequence[int]) -> None:
        """Lets the transfer write prompt block i to `block_ids[i]`, until `close`."""
        with self._lock:
            self._windows[transfer] = _Window(block_ids, self.block_bytes)

    def close(self, transfer: TransferId) -> None:
        """From now on `place` gives the transfer nothing. Idempotent."""
        with self._lock:
            self._windows.pop(transfer, None)

    async def arrived(self, transfer: TransferId, *, timeout_s: float) -> bool:
        """Waits until every byte of the window has come; False where the time ran out first."""
        loop = asyncio.get_running_loop()
        done = asyncio.Event()
        with self._lock:
            window = self._windows.get(transfer)
            if window is None:
                return False
            if window.missing_bytes == 0:
                return True
            window.waiter = functools.partial(_set_from_thread, loop, done)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await done.wait()
        return done.is_set()

    @contextlib.contextmanager
    def place(
        self, transfer: TransferId, index: int, offset: int, size: int
    ) -> Iterator[memoryview | None]:
        """Where to write that piece now, or None. The window cannot close meanwhile."""
        with self._lock:
            window = self._windows.get(transfer)
            if window is None or not self._admits(window, index, offset, size):
                yield None
            else:
                yield self._pool[window.block_ids[index]].data[offset : offset + size]

    def landed(self, transfer: TransferId, index: int, offset: int, size: int) -> None:
        """Counts a whole piece, as stale where it could not be placed."""
        with self._lock:
            window = self._windows.get(transfer)
            if window is None or not self._admits(window, index, offset, size):
                self.num_stale += 1
                return
            window.add(index, offset, offset + size)
            self.num_bytes += size
            if window.waiter is None or window.missing_bytes:
                return
            waiter = window.waiter
        waiter()

    @property
    def any_open(self) -> bool:
        return bool(self._windows)

    def counters(self) -> dict[str, int]:
        return {"stale_frames": self.num_stale, "bytes_received": self.num_bytes}

    def _admits(self, window: _Window, index: int, offset: int, size: int) -> bool:
        end = offset + size
        return size > 0 and end <= self.block_bytes and window.lacks(index, offset, end)


def _set_from_thread(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(event.set)
