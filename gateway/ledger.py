"""Where the time to the first token went."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from core.telemetry.names import SpanName
from core.telemetry.trace import NO_TRACE, RequestTrace
from gateway.backend import TokenBatch
from gateway.waterfall import Waterfall

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Durations in seconds, each by the clock of the process that spent it (see Timing in protos).

    All but `ttft_s` and `total_s` add up to `ttft_s`.
    """

    validate_s: float = 0.0
    render_s: float = 0.0
    tokenise_s: float = 0.0
    queue_s: float = 0.0
    grant_s: float = 0.0
    prefill_wait_s: float = 0.0
    prefill_compute_s: float = 0.0
    transfer_tail_s: float = 0.0
    adopt_s: float = 0.0
    flush_s: float = 0.0
    ttft_s: float = 0.0
    total_s: float = 0.0
    retry_s: float = 0.0
    travel_s: float = 0.0

    @property
    def parts_s(self) -> float:
        """What `ttft_s` is made of, added up."""
        return (
            self.validate_s
            + self.render_s
            + self.tokenise_s
            + self.queue_s
            + self.retry_s
            + self.travel_s
            + self.grant_s
            + self.prefill_wait_s
            + self.prefill_compute_s
            + self.transfer_tail_s
            + self.adopt_s
            + self.flush_s
        )


class Ledger:
    """The timing of one request, written down as it happens, and in its trace as well."""

    def __init__(
        self,
        received_s: float | None = None,
        *,
        trace: RequestTrace = NO_TRACE,
        waterfall: Waterfall | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """`received_s` is when the request came, by the monotonic clock; None: now."""
        self._trace = trace
        self._waterfall = waterfall or Waterfall()
        self._clock = clock
        self._received_s = clock() if received_s is None else received_s
        self._stage_s = self._received_s
        self._timing = Timing()
        self._first_batch_s: float | None = None

    @property
    def elapsed_s(self) -> float:
        """Since the request was received."""
        return self._clock() - self._received_s

    def validated(self) -> None:
        """All that can be known without the prompt's tokens is checked."""
        self._timing = replace(self._timing, validate_s=self._lap(SpanName.VALIDATE))

    def rendered(self) -> None:
        self._timing = replace(self._timing, render_s=self._lap(SpanName.RENDER))

    def tokenised(self) -> None:
        self._timing = replace(self._timing, tokenise_s=self._lap(SpanName.TOKENISE))

    def admitted(self) -> None:
        """The tokens are checked, and paid for; the request goes to the cluster."""
        checked_s = self._timing.validate_s + self._lap()
        self._timing = replace(self._timing, validate_s=checked_s)

    def arrived(self, batch: TokenBatch) -> None:
        """The first batch is here and says where its time went."""
        if self._first_batch_s is not None:
            return
        waits = batch.waits
        self._first_batch_s = self._clock() if waits.arrived_s is None else waits.arrived_s
        self._timing = replace(
            self._timing, queue_s=waits.queue_s, retry_s=waits.retry_s, travel_s=waits.travel_s
        )
        if (handoff := batch.timing) is not None:
            self._timing = replace(
                self._timing,
                grant_s=handoff.grant_s,
                prefill_wait_s=handoff.prefill_wait_s,
                prefill_compute_s=handoff.prefill_compute_s,
                transfer_tail_s=handoff.transfer_tail_s,
                adopt_s=handoff.adopt_s,
            )

    def flushed(self) -> None:
        """The front end has taken what the first batch became."""
        if self._first_batch_s is not None and not self._timing.ttft_s:
            now_s = self._clock()
            self._add(SpanName.FLUSH, self._first_batch_s, now_s)
            self._timing = replace(
                self._timing,
                flush_s=now_s - self._first_batch_s,
                ttft_s=now_s - self._received_s,
            )

    def close(self) -> Timing:
        """The whole ledger, at the request's end."""
        return replace(self._timing, total_s=self.elapsed_s)

    def _lap(self, name: str | None = None) -> float:
        began_s, self._stage_s = self._stage_s, self._clock()
        if name is not None:
            self._add(name, began_s, self._stage_s)
        return self._stage_s - began_s

    def _add(self, name: str, start_s: float, end_s: float) -> None:
        self._trace.add(name, start_s, end_s)
        self._waterfall.add(name, start_s, end_s)
