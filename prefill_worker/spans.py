"""What a prefill worker tells of one transfer: the reading of the prompt, and the sending."""

from core.messages import Prefill
from core.telemetry.names import Attr, Event, SpanName
from core.telemetry.span import NO_SPAN, Span
from core.telemetry.trace import RequestTrace
from core.telemetry.tracer import Tracer


class SendingSpans:
    """Spans under the receiver's own, which the order brought. Times are monotonic seconds."""

    def __init__(self, tracer: Tracer, order: Prefill, accepted_s: float) -> None:
        self.trace: RequestTrace = tracer.work(order.transfer.request_id, order.trace_context)
        self.prefill: Span = self.trace.begin(SpanName.PREFILL, accepted_s)
        self._sending: Span = NO_SPAN
        if self.trace.recording:
            self.prefill.set(
                {Attr.ATTEMPT: order.transfer.attempt, Attr.INPUT_TOKENS: len(order.token_ids)}
            )

    def chunk(self, now_s: float, num_computed_tokens: int, compute_s: float) -> None:
        """A step computed part of the prompt."""
        if self.trace.recording:
            self.prefill.event(
                Event.CHUNK,
                now_s,
                {Attr.COMPUTED: num_computed_tokens, Attr.COMPUTE_S: compute_s},
            )

    def computed(self, now_s: float, *, cached_tokens: int, wait_s: float) -> None:
        """The first token is there."""
        if self.trace.recording:
            self.prefill.set({Attr.CACHED: cached_tokens, Attr.WAIT_S: wait_s})
            self.prefill.end(now_s)

    def sends(self, now_s: float) -> None:
        """Blocks begin to leave. Only the first time counts."""
        if self._sending is NO_SPAN:
            self._sending = self.trace.begin(SpanName.KV_TRANSFER, now_s)

    def sent(
        self,
        now_s: float,
        *,
        transport: str,
        num_blocks: int,
        num_bytes: int,
        busy_s: float,
        by_layer: bool,
    ) -> None:
        """Every block is written; `busy_s` is the time that writing took."""
        if self.trace.recording:
            self._sending.set(
                {
                    Attr.TRANSPORT: transport,
                    Attr.BLOCKS: num_blocks,
                    Attr.BYTES: num_bytes,
                    Attr.GB_PER_S: num_bytes / busy_s / 1e9 if busy_s > 0 else None,
                    Attr.BY_LAYER: by_layer,
                }
            )
            self._sending.end(now_s)

    def over(self, now_s: float, error: str | None) -> None:
        """The transfer is over here; with an error, what goes on was given up."""
        if error is not None:
            self.prefill.end(now_s, error)
            self._sending.end(now_s, error)
        self.trace.finish(now_s)
