"""What one process does for one request: its spans, until they are given away or forgotten."""

import time
from collections.abc import Callable, Mapping

from core.telemetry.context import TraceContext
from core.telemetry.span import NO_SPAN, Span, Value

Finish = Callable[["RequestTrace"], None]


class RequestTrace:
    """Collects spans under one parent. With `recording` False it only passes the context on.

    `root` is what new spans hang under: a SERVER span of ours, or the span of the process that sent
    the work, which is not among `spans`. `key` names the request in every process.
    """

    __slots__ = (
        "_finish",
        "_on_keep",
        "context",
        "kept",
        "key",
        "offset_ns",
        "recording",
        "root",
        "spans",
    )

    def __init__(
        self,
        context: TraceContext | None,
        *,
        key: str = "",
        recording: bool = False,
        finish: Finish | None = None,
    ) -> None:
        self.context = context
        self.key = key
        self.recording = recording
        self.root: Span = NO_SPAN
        self.spans: list[Span] = []
        # From the monotonic clock to Unix time, as it is now: spans of one request keep their order
        # when somebody sets the clock.
        self.offset_ns = time.time_ns() - time.monotonic_ns() if recording else 0
        # Whether it is told of although it was not sampled.
        self.kept = False
        self._finish = finish
        self._on_keep: list[Callable[[], object]] = []

    @property
    def trace_id(self) -> str | None:
        """In hexadecimal, as logs and people have it; None where there is no trace."""
        return self.context.trace_id.hex() if self.context is not None else None

    @property
    def sampled(self) -> bool:
        return self.context is not None and self.context.sampled

    def serve(self, name: str, start_s: float) -> Span:
        """Begins the SERVER span, which every later one hangs under."""
        self.root = self.begin(name, start_s)
        self.root.is_server = True
        return self.root

    def begin(self, name: str, start_s: float, *, parent: Span | None = None) -> Span:
        """A span that goes on; without a parent it hangs under the root."""
        if not self.recording or self.context is None:
            return NO_SPAN
        above = parent if parent is not None and parent is not NO_SPAN else self.root
        span = Span(name, start_s, self.context.span_id if above is NO_SPAN else above.span_id)
        self.spans.append(span)
        return span

    def add(
        self,
        name: str,
        start_s: float,
        end_s: float,
        attributes: Mapping[str, Value | None] | None = None,
        *,
        error: str | None = None,
    ) -> None:
        """A span that is over."""
        if self.recording:
            span = self.begin(name, start_s)
            if attributes:
                span.set(attributes)
            span.end(end_s, error)

    def header(self, span: Span | None = None) -> str:
        """The traceparent to send along with work that hangs under this span, or the root; ""
        where there is no trace."""
        if self.context is None:
            return ""
        above = self.root if span is None or span is NO_SPAN else span
        span_id = self.context.span_id if above is NO_SPAN else above.span_id
        if not span_id:  # nothing is recorded, and nobody above named a span
            return ""
        return str(TraceContext(self.context.trace_id, span_id, self.sampled or self.kept))

    def on_keep(self, tell: Callable[[], object]) -> None:
        """What is called once where the request comes to be kept: others have spans of it."""
        if not self.recording or self.sampled:
            return
        if self.kept:
            tell()
        else:
            self._on_keep.append(tell)

    def keep(self) -> None:
        """It is to be told of, sampled or not. Idempotent."""
        if self.recording and not self.sampled and not self.kept:
            self.kept = True
            tellers, self._on_keep = self._on_keep, []
            for tell in tellers:
                tell()

    def finish(self, at_s: float) -> None:
        """This process is done with the request: spans that go on end here. Idempotent."""
        finish, self._finish = self._finish, None
        if finish is not None:
            for span in self.spans:
                span.end(at_s)
            finish(self)


NO_TRACE = RequestTrace(None)
