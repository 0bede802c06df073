"""What the scheduler tells of requests: how long each waited in the queue, and what came of it."""

from core.messages import Enqueue, Failure, Placement, TransferId
from core.telemetry.names import Attr, SpanName
from core.telemetry.trace import RequestTrace
from core.telemetry.tracer import NO_TRACER, Tracer

_WITHDRAWN = "withdrawn"


class QueueSpans:
    """One span a request that is traced, under the gateway's attempt. Times are monotonic seconds.

    What it is told of others costs nothing.
    """

    def __init__(self, tracer: Tracer = NO_TRACER) -> None:
        self._tracer = tracer
        self._waiting: dict[TransferId, RequestTrace] = {}

    def enqueued(self, message: Enqueue, now_s: float) -> None:
        """A request came; said again after a lost stream, it waits on."""
        if not message.trace_context or message.transfer in self._waiting:
            return
        trace = self._tracer.work(message.transfer.request_id, message.trace_context)
        if trace.recording:
            trace.root = trace.begin(SpanName.QUEUE, now_s)
            trace.root.set(
                {
                    Attr.ATTEMPT: message.transfer.attempt,
                    Attr.INPUT_TOKENS: message.prompt_tokens,
                    Attr.TENANT: message.tenant or None,
                }
            )
            self._waiting[message.transfer] = trace

    def placed(self, placement: Placement, num_queued: int, now_s: float) -> None:
        """It leaves the queue for these workers; so many others wait on."""
        if (trace := self._waiting.pop(placement.transfer, None)) is None:
            return
        prefill, why = placement.prefill, placement.explanation
        trace.root.set(
            {
                Attr.DECODE_WORKER: str(placement.decode.worker),
                Attr.PREFILL_WORKER: str(prefill.worker) if prefill is not None else None,
                Attr.PLACEMENT: why.reason if why is not None else None,
                Attr.QUEUED: num_queued,
            }
        )
        trace.finish(now_s)

    def rejected(self, transfer: TransferId, failure: Failure, now_s: float) -> None:
        """It is refused."""
        self._end(transfer, failure.code, now_s)

    def withdrawn(self, transfer: TransferId, now_s: float) -> None:
        """Nobody waits for it any more. Nothing where it has left the queue."""
        self._end(transfer, _WITHDRAWN, now_s)

    def keep(self, request_id: str) -> None:
        """The gateway wants to know of this request."""
        self._tracer.keep(request_id)

    def _end(self, transfer: TransferId, error: str, now_s: float) -> None:
        if (trace := self._waiting.pop(transfer, None)) is not None:
            trace.root.end(now_s, error)
            trace.finish(now_s)
