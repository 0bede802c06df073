"""Where the time of one request went, stage by stage and process by process.

Made of what the gateway measures and of the durations that ride on the messages, so that it is
there without a collector. Times are seconds of the gateway's monotonic clock.
"""

from dataclasses import dataclass

from core.messages import HandoffTiming, Placement
from core.telemetry.names import SpanName

_GATEWAY, _SCHEDULER = "gateway", "scheduler"
# An answer that was retried and requeued as often as can be has fewer.
MAX_STAGES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """`process` is a name such as decode-0; `attempt` is 0 outside of any."""

    name: str
    process: str
    start_s: float
    end_s: float
    attempt: int = 0
    error: str | None = None


class Waterfall:
    """Told by the request's ledger and its attempts."""

    def __init__(self) -> None:
        self.stages: list[Stage] = []
        self._attempt = 0
        self._began_s = 0.0
        self._placement: Placement | None = None
        # Since when the present attempt's tokens come.
        self._decoding_s: float | None = None

    def add(
        self,
        name: str,
        start_s: float,
        end_s: float,
        *,
        process: str = _GATEWAY,
        error: str | None = None,
    ) -> None:
        """A stage that is over. Past MAX_STAGES it is left out."""
        if len(self.stages) < MAX_STAGES:
            self.stages.append(
                Stage(
                    name=name,
                    process=process,
                    start_s=start_s,
                    end_s=end_s,
                    attempt=self._attempt if process != _GATEWAY else 0,
                    error=error,
                )
            )

    def begin(self, attempt: int, now_s: float) -> None:
        """An attempt joins the queue."""
        self._attempt, self._began_s = attempt, now_s
        self._placement = self._decoding_s = None

    def placed(self, placement: Placement, now_s: float) -> None:
        """It has left the queue for these workers."""
        self._placement = placement
        end_s = min(now_s, self._began_s + placement.queue_s)
        self.add(SpanName.QUEUE, self._began_s, end_s, process=_SCHEDULER)

    def arrived(self, handoff: HandoffTiming, now_s: float) -> None:
        """The attempt's first token came. Its parts are laid out backwards from now.

        What is left between them and the queue are messages on their way.
        """
        if self._placement is None or self._decoding_s is not None:
            return
        decode = self._placement.decode.worker.name
        prefill = self._placement.prefill
        reader = prefill.worker.name if prefill is not None else decode
        start_s = max(self._began_s + self._placement.queue_s, now_s - handoff.total_s)
        for name, process, duration_s in (
            ("grant", decode, handoff.grant_s),
            ("prefill_wait", reader, handoff.prefill_wait_s),
            ("prefill", reader, handoff.prefill_compute_s),
            ("transfer_tail", decode, handoff.transfer_tail_s),
            ("adopt", decode, handoff.adopt_s),
        ):
            end_s = min(now_s, start_s + duration_s)
            if duration_s > 0:
                self.add(name, start_s, end_s, process=process)
            start_s = end_s
        self._decoding_s = now_s

    def end(self, now_s: float, error: str | None = None) -> None:
        """The present attempt is over. Idempotent."""
        if self._attempt == 0 or self._began_s > now_s:
            return
        if self._placement is None:
            if error is not None:
                self.add(SpanName.QUEUE, self._began_s, now_s, process=_SCHEDULER, error=error)
        elif self._decoding_s is not None:
            worker = self._placement.decode.worker.name
            self.add(SpanName.DECODE, self._decoding_s, now_s, process=worker, error=error)
        else:  # before its first token: which of the two workers had it is not known
            worker = self._placement.decode.worker.name
            since_s = self._began_s + self._placement.queue_s
            self.add(SpanName.ATTEMPT, since_s, now_s, process=worker, error=error)
        self._attempt = 0
