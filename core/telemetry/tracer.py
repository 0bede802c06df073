"""One process's traces: which requests are recorded, and which of them are told of.

A request is sampled at its start, as its caller decided or by the share that is configured, and
that travels with it. Whether it went wrong is known at its end alone, and in the gateway alone. So
where failures or missed targets are to be kept, every process records every request; what was not
sampled is put aside, the oldest forgotten first, and exported when the gateway says Keep.
"""

import os
from collections import OrderedDict

from core.config import TelemetryConfig
from core.telemetry.context import TraceContext
from core.telemetry.exporter import SpanExporter
from core.telemetry.names import Attr, Kept, SpanName
from core.telemetry.span import Span
from core.telemetry.trace import NO_TRACE, RequestTrace

_ID_BITS = 64


class Tracer:
    """Gives traces to requests. Without an exporter nothing is recorded, and contexts pass on."""

    def __init__(self, config: TelemetryConfig, exporter: SpanExporter | None = None) -> None:
        self._config = config
        self._exporter = exporter
        ratio = 1.0 if config.sample_ratio is None else config.sample_ratio
        self._bound = round(ratio * 2**_ID_BITS)
        # Not sampled: requests under way, and those that are over, the oldest first.
        self._live: dict[str, list[RequestTrace]] = {}
        self._aside: OrderedDict[str, list[RequestTrace]] = OrderedDict()
        self._keeps = exporter is not None and (config.keep_errors or config.keep_slo_misses)
        self.num_forgotten = 0

    @property
    def tokens_per_event(self) -> int:
        """Tokens of an answer from one event of its decode span to the next."""
        return self._config.tokens_per_event

    def request(self, traceparent: str | None) -> RequestTrace:
        """A request from outside: under its caller's trace, or under one of its own."""
        above = TraceContext.parse(traceparent)
        if self._exporter is None:
            return RequestTrace(above) if above is not None else NO_TRACE
        if above is None:
            trace_id = os.urandom(16)
            sampled = int.from_bytes(trace_id[8:]) < self._bound
            above = TraceContext(trace_id, b"", sampled)
        recording = above.sampled or self._keeps
        return RequestTrace(above, recording=recording, finish=self._served if recording else None)

    def work(self, key: str, trace_context: str) -> RequestTrace:
        """A part of a request that another process of the cluster sent. `key` is the request's."""
        if self._exporter is None or (above := TraceContext.parse(trace_context)) is None:
            return NO_TRACE
        if not (above.sampled or self._keeps):
            return RequestTrace(above)
        trace = RequestTrace(above, key=key, recording=True, finish=self._worked)
        if not above.sampled:
            self._live.setdefault(key, []).append(trace)
        return trace

    def step(
        self,
        start_s: float,
        end_s: float,
        links: list[tuple[RequestTrace, Span]],
        *,
        sequences: int,
        number: int,
    ) -> None:
        """A step of the engine that did something for these spans: linked, no child of any.

        Of how many sequences, and which one since the worker's start.
        """
        if self._exporter is None or not links:
            return
        context = TraceContext(os.urandom(16), b"", True)
        trace = RequestTrace(context, recording=True)
        span = trace.begin(SpanName.STEP, start_s)
        span.set({Attr.SEQUENCES: sequences, Attr.STEP_NUMBER: number})
        for other, linked in links:
            assert other.context is not None
            span.links.append((other.context.trace_id, linked.span_id))
        span.end(end_s)
        self._exporter.offer(trace)

    def reason_to_keep(
        self, *, failed: bool, ttft_s: float | None, tpot_s: float | None
    ) -> Kept | None:
        """Why a request that ended so is told of in any case; None where nothing was amiss."""
        config = self._config
        if failed and config.keep_errors:
            return Kept.ERROR
        if config.keep_slo_misses:
            if ttft_s is not None and ttft_s > config.slo_ttft_s:
                return Kept.SLO_TTFT
            if tpot_s is not None and tpot_s > config.slo_tpot_s:
                return Kept.SLO_TPOT
        return None

    def keep(self, key: str) -> None:
        """The gateway wants to know of this request, whether it is over here or not."""
        for trace in self._live.get(key, ()):
            trace.keep()
        for trace in self._aside.pop(key, ()):
            trace.keep()
            self._export(trace)

    def counters(self) -> dict[str, int]:
        """Spans since the start: exported, dropped where the queue was full, failed to be sent."""
        return self._exporter.counters() if self._exporter is not None else {}

    def close(self) -> None:
        """Sends what is queued, within a few seconds."""
        if self._exporter is not None:
            self._exporter.close()

    def _served(self, trace: RequestTrace) -> None:
        if trace.sampled or trace.kept:
            self._export(trace)

    def _worked(self, trace: RequestTrace) -> None:
        if not trace.sampled:
            alive = self._live[trace.key]
            alive.remove(trace)
            if not alive:
                del self._live[trace.key]
        if trace.sampled or trace.kept:
            self._export(trace)
            return
        self._aside.setdefault(trace.key, []).append(trace)
        if len(self._aside) > self._config.tail_requests:
            self._aside.popitem(last=False)
            self.num_forgotten += 1

    def _export(self, trace: RequestTrace) -> None:
        if self._exporter is not None and trace.spans:
            self._exporter.offer(trace)


NO_TRACER = Tracer(TelemetryConfig())
