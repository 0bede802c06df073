"""A collector that is slow or dead costs nobody anything but spans, and those are counted."""

import threading
import time

import pytest

from core.telemetry.context import TraceContext
from core.telemetry.exporter import SpanExporter
from core.telemetry.trace import RequestTrace

CONTEXT = TraceContext(b"t" * 16, b"s" * 8, True)


def trace(num_spans=1):
    made = RequestTrace(CONTEXT, recording=True)
    for _ in range(num_spans):
        made.add("x", 1.0, 2.0)
    return made


class Collector:
    """Takes batches, one after the other; blocks until `free` is set."""

    def __init__(self, *answers):
        """What becomes of the first batches; the later ones arrive."""
        self.free = threading.Event()
        self.busy = threading.Event()
        self.closed = False
        self._answers = list(answers)

    def send(self, traces):
        self.busy.set()
        assert self.free.wait(10)
        answer = self._answers.pop(0) if self._answers else True
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self):
        self.closed = True
        self.free.set()


def until(condition):
    """The exporter's thread tells of nothing but its counters."""
    end_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.001)


def counts(exporter):
    told = exporter.counters()
    return told["spans_exported"], told["spans_dropped"], told["spans_failed"]


def test_what_does_not_fit_the_queue_is_dropped_and_counted():
    collector = Collector()
    exporter = SpanExporter(collector, max_spans=600)
    exporter.offer(trace(512))
    assert collector.busy.wait(10)  # that batch is with the collector, which does not answer
    for _ in range(4):
        exporter.offer(trace(200))
    assert counts(exporter) == (0, 200, 0)
    collector.free.set()
    exporter.close()
    assert counts(exporter) == (512 + 600, 200, 0)


def test_closing_sends_what_waits():
    collector = Collector()
    collector.free.set()
    exporter = SpanExporter(collector, max_spans=10)
    exporter.offer(trace(3))
    exporter.close()
    exporter.offer(trace(2))
    assert counts(exporter) == (3, 2, 0)


@pytest.mark.parametrize("fault", [False, ValueError("bug")])
def test_a_batch_that_is_lost_is_counted_and_ends_nothing(fault):
    collector = Collector(fault)
    collector.free.set()
    exporter = SpanExporter(collector, max_spans=2000)
    exporter.offer(trace(512))
    until(lambda: counts(exporter)[2] == 512)
    exporter.offer(trace(2))
    exporter.close()
    assert counts(exporter) == (2, 0, 512)


def test_closing_gives_up_a_collector_that_does_not_answer(monkeypatch):
    monkeypatch.setattr("core.telemetry.exporter._CLOSE_TIMEOUT_S", 0.05)
    collector = Collector(False)
    exporter = SpanExporter(collector, max_spans=2000)
    exporter.offer(trace(512))
    assert collector.busy.wait(10)
    exporter.offer(trace(3))
    exporter.close()
    assert collector.closed
    assert counts(exporter) == (0, 3, 512)
