"""Outcomes into figures, and what a good answer is."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.load.summary import Distribution
from bench.sim.request import Outcome
from bench.sim.system import Run
from core.errors import InvalidRequest

# The first of the outcomes, which found an empty cluster, are in no figure.
WARM_UP_SHARE = 0.1
# Of the bound on gaps, what a decode worker's steps aim at; without a bound, this many seconds.
_TARGET_SHARE = 0.9
_DEFAULT_TARGET_S = 0.018


@dataclass(frozen=True, slots=True, kw_only=True)
class SimSlo:
    """Bounds in milliseconds. `share` of all requests must keep to all that are given.

    TBT10 is the mean of the longest tenth of a request's gaps between tokens.
    """

    ttft_ms: float | None = None
    tbt10_ms: float | None = None
    tpot_ms: float | None = None
    share: float = 0.9

    def __bool__(self) -> bool:
        return any(bound is not None for bound in (self.ttft_ms, self.tbt10_ms, self.tpot_ms))

    def checked(self) -> "SimSlo":
        """Itself. Raises InvalidRequest."""
        for name in ("ttft_ms", "tbt10_ms", "tpot_ms"):
            bound = getattr(self, name)
            if bound is not None and not 0 < bound < float("inf"):
                flag = "--slo-" + name.replace("_", "-")
                raise InvalidRequest(f"{flag} must be positive, not {bound:g}", field=name)
        if not 0 < self.share <= 1:
            raise InvalidRequest(
                f"--slo-share must be in (0, 1], not {self.share:g}", field="share"
            )
        return self

    @property
    def gap_ms(self) -> float | None:
        """The bound on an answer's gaps, whichever mean it is of; None: there is none."""
        return self.tbt10_ms or self.tpot_ms

    @property
    def itl_target_s(self) -> float:
        """What an operator who promises this sets `engine.itl_target_s` to."""
        gap_ms = self.gap_ms
        return _DEFAULT_TARGET_S if gap_ms is None else _TARGET_SHARE * gap_ms / 1e3

    def met(self, outcome: Outcome) -> bool:
        """Whether an answer came in time; no answer never does."""
        if not outcome.ok:
            return False
        return (
            (self.ttft_ms is None or 1e3 * outcome.ttft_s <= self.ttft_ms)
            and (self.tbt10_ms is None or 1e3 * outcome.tbt10_s <= self.tbt10_ms)
            and (self.tpot_ms is None or 1e3 * outcome.tpot_s <= self.tpot_ms)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of one run, without its first tenth; of workers, of all of it.

    `busy_share` is of the time until the last arrival. `kv_share` is the largest part of a pool
    that was ever held.
    """

    requests: int
    completed: int
    errors: Mapping[str, int]
    good_share: float
    requests_per_s: float
    goodput_requests_per_s: float
    output_tokens_per_s: float
    ttft_ms: Distribution | None
    tbt10_ms: Distribution | None
    tpot_ms: Distribution | None
    e2e_ms: Distribution | None
    read_locally: float
    cached_share: float
    preemptions: int
    busy_share: Mapping[str, float]
    kv_share: Mapping[str, float]


def counted(outcomes: Sequence[Outcome]) -> Sequence[Outcome]:
    """Those that figures are of."""
    return outcomes[int(len(outcomes) * WARM_UP_SHARE) :]


def good_share(outcomes: Sequence[Outcome], slo: SimSlo) -> float:
    """Of those that count."""
    those = counted(outcomes)
    return sum(slo.met(outcome) for outcome in those) / len(those)


def figures(run: Run, slo: SimSlo) -> Figures:
    """All of them."""
    those = counted(run.outcomes)
    done = [outcome for outcome in those if outcome.ok]
    ends_s = [o.finished_s for o in those if o.finished_s is not None]
    began_s = those[0].request.arrival_s
    duration_s = max(max(ends_s, default=began_s) - began_s, 1e-9)
    good = sum(slo.met(outcome) for outcome in those)
    gaps = [outcome for outcome in done if outcome.num_tokens > 1]
    prompt_tokens = sum(outcome.request.prompt_tokens for outcome in done)
    return Figures(
        requests=len(those),
        completed=len(done),
        errors=dict(Counter(o.failure for o in those if o.failure is not None)),
        good_share=good / len(those),
        requests_per_s=len(done) / duration_s,
        goodput_requests_per_s=good / duration_s,
        output_tokens_per_s=sum(outcome.num_tokens for outcome in done) / duration_s,
        ttft_ms=Distribution.of_seconds(outcome.ttft_s for outcome in done),
        tbt10_ms=Distribution.of_seconds(outcome.tbt10_s for outcome in gaps),
        tpot_ms=Distribution.of_seconds(outcome.tpot_s for outcome in gaps),
        e2e_ms=Distribution.of_seconds(outcome.e2e_s for outcome in done),
        read_locally=sum(o.read_locally for o in done) / max(1, len(done)),
        cached_share=sum(o.cached_tokens for o in done) / max(1, prompt_tokens),
        preemptions=run.preemptions,
        busy_share=run.busy_share,
        kv_share=run.kv_share,
    )
