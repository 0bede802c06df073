"""The attempts of one request: a span of each, and where the time before the first token went."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from core.messages import HandoffTiming, Placement
from core.telemetry.names import Attr, Event, SpanName
from core.telemetry.span import NO_SPAN, Span
from core.telemetry.trace import RequestTrace
from gateway.waterfall import Waterfall


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """What the gateway alone can tell of the time to the first token, in seconds.

    From the first attempt's beginning to the first token's arrival, these and the hand-off's own
    timing leave nothing out.
    """

    # In the scheduler's queue, and before queueing again where a worker had no room.
    queue_s: float = 0.0
    # Attempts that came to nothing, but for their time in the queue.
    retry_s: float = 0.0
    # Of the attempt that brought the token: between the processes.
    travel_s: float = 0.0
    # When the token came, by the monotonic clock.
    arrived_s: float | None = None


NO_WAITS = Waits()


class Attempts:
    """Told by the session what happens; the present attempt is the last one begun."""

    def __init__(
        self,
        trace: RequestTrace,
        clock: Callable[[], float] = time.monotonic,
        *,
        waterfall: Waterfall | None = None,
    ) -> None:
        self._trace = trace
        self._waterfall = waterfall or Waterfall()
        self._clock = clock
        self._span: Span = NO_SPAN
        self._began_s = 0.0
        self._attempt_queue_s = 0.0
        self._queue_s = 0.0
        self._retry_s = 0.0

    @property
    def trace_context(self) -> str:
        """What goes along with the present attempt's messages."""
        return self._trace.header(self._span)

    def begin(self, number: int, *, num_sent: int) -> None:
        """Another attempt; with `num_sent` tokens the client has part of the answer already."""
        self._began_s = self._clock()
        self._attempt_queue_s = 0.0
        self._waterfall.begin(number, self._began_s)
        self._span = self._trace.begin(SpanName.ATTEMPT, self._began_s)
        if self._trace.recording:
            self._span.set({Attr.ATTEMPT: number, Attr.TOKENS_BEFORE: num_sent or None})
            if num_sent:
                self._span.event(Event.MIGRATED, self._began_s, {Attr.TOKENS: num_sent})

    def placed(self, placement: Placement) -> None:
        """The scheduler has found it workers."""
        self._attempt_queue_s = placement.queue_s
        self._waterfall.placed(placement, self._clock())
        if self._trace.recording:
            prefill = placement.prefill
            self._span.set(
                {
                    Attr.DECODE_WORKER: str(placement.decode.worker),
                    Attr.PREFILL_WORKER: str(prefill.worker) if prefill is not None else None,
                    Attr.PLACEMENT: placement.explanation.reason if placement.explanation else None,
                }
            )

    def failed(self, error: str) -> None:
        """The present attempt is over, by an error of this code."""
        now_s = self._clock()
        self._queue_s += self._attempt_queue_s
        self._retry_s += max(0.0, now_s - self._began_s - self._attempt_queue_s)
        self._waterfall.end(now_s, error)
        self._span.end(now_s, error)

    def paused(self, seconds: float) -> None:
        """Waited before it queues again."""
        self._queue_s += seconds

    def arrived(self, handoff: HandoffTiming) -> Waits:
        """The request's first token came with this attempt."""
        now_s = self._clock()
        self._waterfall.arrived(handoff, now_s)
        since_s = now_s - self._began_s
        return Waits(
            queue_s=self._queue_s + self._attempt_queue_s,
            retry_s=self._retry_s,
            travel_s=max(0.0, since_s - self._attempt_queue_s - handoff.total_s),
            arrived_s=now_s,
        )

    def end(self) -> None:
        """The request is over. Idempotent."""
        now_s = self._clock()
        self._waterfall.end(now_s)
        self._span.end(now_s)
