"""Spans on their way to a collector: a bounded queue, and one thread that empties it.

A collector that is slow, dead or never there costs requests nothing: what does not fit into the
queue is dropped and counted, and what cannot be sent is given up and counted. (The SDK's own
BatchSpanProcessor counts neither, and writes a line for every span that it drops.)
"""

import threading
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import structlog

from core.telemetry.trace import RequestTrace

# What is sent together, and how long the first of it waits for company.
_BATCH_SPANS = 512
_INTERVAL_S = 1.0
# For what is queued at the end, and then for what is being sent to be given up.
_CLOSE_TIMEOUT_S = 3.0
_GIVE_UP_TIMEOUT_S = 1.0


class Sender(Protocol):
    """Sends finished traces. Used by one thread, but for `close`."""

    def send(self, traces: Sequence[RequestTrace]) -> bool:
        """Whether the collector has them; may block for many seconds, and try again."""
        ...

    def close(self) -> None:
        """Ends what is under way."""
        ...


class SpanExporter:
    """Owns the queue and the thread. `offer` is for the event loop and never blocks."""

    def __init__(self, sender: Sender, *, max_spans: int) -> None:
        self._sender = sender
        self._max_spans = max_spans
        self._queue: deque[RequestTrace] = deque()
        self._num_queued = 0
        self._exported = self._dropped = self._failed = 0
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._closing = threading.Event()
        self._log = structlog.get_logger()
        self._thread = threading.Thread(target=self._run, name="export spans", daemon=True)
        self._thread.start()

    def offer(self, trace: RequestTrace) -> None:
        """Queues the spans of a trace that nobody changes any more, or drops them."""
        n = len(trace.spans)
        with self._lock:
            if self._closing.is_set() or self._num_queued + n > self._max_spans:
                self._dropped += n
                return
            self._queue.append(trace)
            self._num_queued += n
            full = self._num_queued >= _BATCH_SPANS
        if full:
            self._news.set()

    def counters(self) -> dict[str, int]:
        """Spans since the start."""
        with self._lock:
            return {
                "spans_exported": self._exported,
                "spans_dropped": self._dropped,
                "spans_failed": self._failed,
            }

    def close(self) -> None:
        """Sends what is queued and ends the thread; after a few seconds the rest is dropped."""
        self._closing.set()
        self._news.set()
        self._thread.join(_CLOSE_TIMEOUT_S)
        with self._lock:
            self._dropped += self._num_queued
            self._queue.clear()
            self._num_queued = 0
        self._sender.close()
        self._thread.join(_GIVE_UP_TIMEOUT_S)

    def _run(self) -> None:
        while True:
            self._news.wait(_INTERVAL_S)
            self._news.clear()
            while batch := self._take():
                self._deliver(batch)
            if self._closing.is_set():
                return

    def _take(self) -> list[RequestTrace]:
        batch: list[RequestTrace] = []
        n = 0
        with self._lock:
            while self._queue and n < _BATCH_SPANS:
                batch.append(self._queue.popleft())
                n += len(batch[-1].spans)
            self._num_queued -= n
        return batch

    def _deliver(self, batch: list[RequestTrace]) -> None:
        n = sum(len(trace.spans) for trace in batch)
        fault: str | None = None
        try:
            sent = self._sender.send(batch)
        except Exception as error:  # a fault of ours must not end all tracing
            sent, fault = False, type(error).__name__
        with self._lock:
            self._exported += n if sent else 0
            self._failed += 0 if sent else n
            told = {"queued": self._num_queued, "dropped": self._dropped, "failed": self._failed}
        if not sent:  # at most one line a batch, and a batch that fails takes seconds
            self._log.warning("spans_not_exported", fault=fault, **told)
