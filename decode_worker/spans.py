"""What a decode worker tells of a request: reserving, receiving or reading, adopting, decoding."""

from core.messages import Failure, Start, StopReason
from core.telemetry.names import Attr, Event, SpanName
from core.telemetry.span import NO_SPAN, Span
from core.telemetry.trace import RequestTrace
from core.telemetry.tracer import Tracer


class SessionSpans:
    """Spans under the gateway's attempt. One stage follows another; times are monotonic seconds."""

    def __init__(self, tracer: Tracer, start: Start, started_s: float) -> None:
        self.trace: RequestTrace = tracer.work(start.transfer.request_id, start.trace_context)
        self.stage: Span = self.trace.begin(SpanName.RESERVE, started_s)
        self._every = tracer.tokens_per_event
        self._num_tokens = 0
        self._preemptions = 0
        self._decoding = False
        self.stage.set({Attr.ATTEMPT: start.transfer.attempt} if self.trace.recording else {})

    @property
    def trace_context(self) -> str:
        """For the prefill worker: its spans hang under the receiving one."""
        return self.trace.header(self.stage)

    def reserved(self, num_blocks: int, cached_tokens: int) -> None:
        """Blocks are leased."""
        if self.trace.recording:
            self.stage.set({Attr.BLOCKS: num_blocks, Attr.CACHED: cached_tokens})

    def asks(self, now_s: float, prefill_worker: str, transport: str, num_blocks: int) -> None:
        """The prefill worker is asked, and from here on blocks may arrive."""
        self._next(SpanName.KV_RECEIVE, now_s)
        if self.trace.recording:
            self.stage.set(
                {
                    Attr.PREFILL_WORKER: prefill_worker,
                    Attr.TRANSPORT: transport,
                    Attr.BLOCKS: num_blocks,
                }
            )

    def reads(self, now_s: float) -> None:
        """The prompt is read here."""
        self._next(SpanName.PREFILL, now_s)
        if self.trace.recording:
            self.stage.set({Attr.LOCAL: True})

    def chunk(self, now_s: float, num_computed_tokens: int, compute_s: float) -> None:
        """A step computed part of a prompt that is read here."""
        if self.trace.recording:
            self.stage.event(
                Event.CHUNK,
                now_s,
                {Attr.COMPUTED: num_computed_tokens, Attr.COMPUTE_S: compute_s},
            )

    def committed(self, now_s: float) -> None:
        """The sender says that all of it is here."""
        self._next(SpanName.ADOPT, now_s)

    def decodes(self, now_s: float) -> None:
        """The first token is on its way to the gateway."""
        self._next(SpanName.DECODE, now_s)
        self._decoding = True
        self._num_tokens = 1

    def token(self, now_s: float, num_preemptions: int) -> bool:
        """One more token of any choice. True where an event was made of it.

        To be called only where `trace.recording`.
        """
        if not self._decoding:
            return False
        self._num_tokens += 1
        if num_preemptions > self._preemptions:
            self._preemptions = num_preemptions
            self.stage.event(Event.PREEMPTED, now_s, {Attr.PREEMPTIONS: num_preemptions})
        if self._num_tokens % self._every:
            return False
        self.stage.event(Event.TOKENS, now_s, {Attr.TOKENS: self._num_tokens})
        return True

    def over(self, now_s: float, reason: StopReason, failure: Failure | None) -> None:
        """The gateway is told how it ended."""
        if self.trace.recording:
            if self._decoding:
                ended = (reason.name.lower(),)
                self.stage.set(
                    {Attr.OUTPUT_TOKENS: self._num_tokens, Attr.RESPONSE_FINISH_REASONS: ended}
                )
            cancelled = "cancelled" if reason is StopReason.CANCELLED else None
            self.stage.end(now_s, failure.code if failure is not None else cancelled)
        self.trace.finish(now_s)

    def _next(self, name: SpanName, now_s: float) -> None:
        self.stage.end(now_s)
        self.stage = self.trace.begin(name, now_s) if self.trace.recording else NO_SPAN
