"""The one thread of a worker that touches tensors."""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from core.errors import Unavailable

T = TypeVar("T")


class ComputeThread:
    """Runs functions one at a time on a thread of its own; an event loop awaits their results.

    `threads` is the number of cores that torch's kernels may use. `torch.set_num_threads` counts
    for the whole process where torch's own pool and MKL are concerned, and for the calling thread
    alone where OpenMP is; it is therefore called on the compute thread, by this class only. Limits
    that must hold from the first import (OMP_NUM_THREADS and its like) are the launcher's to set.

    `close` belongs to whoever made the thread. The thread is a daemon: one that hangs in a kernel
    does not keep its process alive.
    """

    def __init__(self, *, threads: int, name: str = "compute") -> None:
        if threads < 1:
            raise ValueError(f"{threads} threads")
        self._threads = threads
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, fn: Callable[..., T], *args: object) -> asyncio.Future[T]:
        """Queues `fn(*args)`; its result or exception arrives in the running loop's future.

        A future that is cancelled does not stop the function. Raises Unavailable after `close`.
        """
        if self._closed:
            raise Unavailable("the compute thread is closed")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def job() -> None:
            try:
                result = fn(*args)
            except BaseException as error:
                _deliver(loop, _settle, future, None, error)
            else:
                _deliver(loop, _settle, future, result, None)

        self._jobs.put(job)
        return future

    async def run(self, fn: Callable[..., T], *args: object) -> T:
        """Queues `fn(*args)` and awaits it."""
        return await self.submit(fn, *args)

    async def close(self, *, timeout_s: float = 5.0) -> bool:
        """Ends the thread after the work it was given. False where it did not end in time."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
        await asyncio.to_thread(self._thread.join, timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        torch.set_num_threads(self._threads)
        while (job := self._jobs.get()) is not None:
            job()
            # A finished job must not keep its tensors alive while the thread waits for the next.
            del job


def _deliver(loop: asyncio.AbstractEventLoop, fn: Callable[..., None], *args: object) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(fn, *args)


def _settle(future: asyncio.Future[T], result: T, error: BaseException | None) -> None:
    if future.done():  # the waiter was cancelled
        return
    if isinstance(error, StopIteration):  # a future cannot carry it
        error = RuntimeError("the function raised StopIteration")
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
