"""Where the time before the first token went, over all attempts, and a span of each."""

from core.messages import Endpoint, HandoffTiming, Placement, TransferId, WorkerRef
from core.telemetry.context import TraceContext
from core.telemetry.trace import NO_TRACE, RequestTrace
from gateway.attempts import Attempts
from gateway.backend import TokenBatch
from gateway.ledger import Ledger


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def placement(queue_s):
    worker = Endpoint(worker=WorkerRef(name="d", incarnation="1"), address="unix:d")
    transfer = TransferId(request_id="r", attempt=1)
    return Placement(transfer=transfer, prefill=None, decode=worker, queue_s=queue_s)


def test_the_waits_of_a_request_that_was_refused_and_tried_again_leave_nothing_out():
    clock = Clock()
    attempts = Attempts(NO_TRACE, clock)
    ledger = Ledger(0.0, clock=clock)
    clock.now_s = 0.25
    ledger.validated()
    attempts.begin(1, num_sent=0)
    clock.now_s = 1.25  # of that second, 0.75 in the scheduler's queue
    attempts.placed(placement(0.75))
    clock.now_s = 2.25
    attempts.failed("overloaded")
    clock.now_s = 2.75
    attempts.paused(0.5)
    attempts.begin(2, num_sent=0)
    clock.now_s = 3.75
    attempts.placed(placement(0.5))
    clock.now_s = 5.75
    handoff = HandoffTiming(
        grant_s=0.25, prefill_wait_s=0.25, prefill_compute_s=0.5, transfer_tail_s=0.25, adopt_s=0.25
    )
    waits = attempts.arrived(handoff)
    assert waits.queue_s == 0.75 + 0.5 + 0.5
    assert waits.retry_s == 2.0 - 0.75
    assert waits.travel_s == 3.0 - 0.5 - handoff.total_s
    clock.now_s = 6.0
    ledger.arrived(TokenBatch(token_ids=(1,), waits=waits, timing=handoff))
    clock.now_s = 6.5
    ledger.flushed()
    timing = ledger.close()
    assert timing.flush_s == 0.75
    assert timing.parts_s == timing.ttft_s == 6.5


def test_each_attempt_has_a_span_and_sends_its_own_context():
    clock = Clock()
    trace = RequestTrace(TraceContext(b"t" * 16, b"c" * 8, True), recording=True)
    root = trace.serve("chat m", 0.0)
    attempts = Attempts(trace, clock)
    contexts = []
    for number in (1, 2):
        attempts.begin(number, num_sent=3 * (number - 1))
        contexts.append(TraceContext.parse(attempts.trace_context).span_id)
        attempts.placed(placement(0.0))
        clock.now_s += 1.0
        if number == 1:
            attempts.failed("worker_lost")
    attempts.end()
    first, second = (span for span in trace.spans if span.name == "attempt")
    assert [first.span_id, second.span_id] == contexts
    assert first.parent_id == second.parent_id == root.span_id
    assert (first.error, first.end_s, second.error, second.end_s) == ("worker_lost", 1.0, None, 2.0)
    assert second.attributes["tandem.tokens_before"] == 3
    assert [name for name, _, _ in second.events] == ["migrated"]
