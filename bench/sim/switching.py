"""A load that changes its nature: conversations, code, and conversations again.

No split of four workers suits both, so that a static one is chosen for the worse of them.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from bench.sim.agenda import Agenda
from bench.sim.comparison import Make, colocated, ours_for, static_split, work_bound
from bench.sim.figures import WARM_UP_SHARE, SimSlo, good_share
from bench.sim.goodput import highest_rate
from bench.sim.request import Outcome, SimRequest
from bench.sim.rows import CHUNKS, SPLITS
from bench.sim.shape import ClusterShape
from bench.sim.system import run
from bench.sim.tandem import Tandem
from bench.sim.timing import Timing
from bench.sim.trace import TraceRow

PHASE_S = 600.0
SLO = SimSlo(ttft_ms=400, tbt10_ms=30)
_HORIZON_S = 1e6
# A run is half an hour of requests: the search is a little coarser than that of the rows.
_PRECISION, _STRIDE = 0.03, 1.03
# Shares of the bound near which the best static choice, and ours, were found.
_GUESSES = (0.6, 0.76)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Lengths to draw from, and at which rate they arrive at a load of 1."""

    lengths: Sequence[TraceRow]
    rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Switched:
    """Goodput as a share of what the bound allows in each phase; `rates` are those at a share of 1.

    Of `static`, the `best` is exact; of any other choice it is only known that it fails there.
    """

    static: Mapping[str, float]
    best: str
    ours: float
    num_turns: int
    rates: Sequence[float]

    @property
    def ratio(self) -> float:
        """Ours to the best of the static ones."""
        return self.ours / self.static[self.best]


def phases(
    conversations: Sequence[TraceRow], code: Sequence[TraceRow], timing: Timing, workers: int
) -> list[Phase]:
    """Each at the rate that no schedule exceeds."""
    return [
        Phase(lengths=lengths, rate=work_bound(lengths, timing, workers))
        for lengths in (conversations, code, conversations)
    ]


def arrivals(
    load: float, those: Sequence[Phase], *, phase_s: float = PHASE_S, seed: int = 1
) -> list[SimRequest]:
    """Poisson arrivals at `load` times each phase's rate, one phase after the other."""
    chance = random.Random(seed)
    requests: list[SimRequest] = []
    for number, phase in enumerate(those):
        now_s, ends_s = number * phase_s, (number + 1) * phase_s
        while (now_s := now_s + chance.expovariate(load * phase.rate)) < ends_s:
            row = chance.choice(phase.lengths)
            requests.append(
                SimRequest(
                    index=len(requests),
                    arrival_s=now_s,
                    prompt_tokens=row.prompt_tokens,
                    output_tokens=row.output_tokens,
                )
            )
    return requests


def share_at(load: float, those: Sequence[Phase], make: Make) -> float:
    """The share of good answers; of a run that was broken off because too many were bad, fewer."""
    requests = arrivals(load, those)
    first = int(len(requests) * WARM_UP_SHARE)
    left = int((1 - SLO.share) * (len(requests) - first))

    def hopeless(outcome: Outcome) -> bool:
        nonlocal left
        left -= outcome.request.index >= first and not SLO.met(outcome)
        return left < 0

    agenda = Agenda()
    done = run(make(agenda), agenda, requests, horizon_s=_HORIZON_S, hopeless=hopeless)
    return good_share(done.outcomes, SLO)


def compare_switching(
    those: Sequence[Phase], timing: Timing, shape: ClusterShape, workers: int
) -> Switched:
    """Every static choice, and `shape` with workers that turn."""
    choices = {f"{p}P{d}D": static_split(p, d, timing) for p, d in SPLITS}
    choices |= {f"colocated {chunk}": colocated(chunk, timing, workers) for chunk in CHUNKS}
    best, static = "", dict[str, float]()
    for name, make in choices.items():
        beats = static[best] * (1 + _PRECISION) if best else _GUESSES[0]
        if best and share_at(beats, those, make) < SLO.share:
            static[name] = beats
            continue
        if best:  # what it beats fails at what it reaches
            static[best] = beats
        static[name] = _highest(those, make, beats)
        best = name
    elastic = replace(ours_for(SLO, shape), elastic="auto")
    made: list[Tandem] = []

    def ours(agenda: Agenda) -> Tandem:
        made.append(Tandem(elastic, timing, agenda))
        return made[-1]

    found = _highest(those, ours, _GUESSES[1])
    return Switched(
        static=static,
        best=best,
        ours=found,
        num_turns=made[-1].num_turns,
        rates=[phase.rate for phase in those],
    )


def _highest(those: Sequence[Phase], make: Make, guess: float) -> float:
    return highest_rate(
        lambda load: share_at(load, those, make),
        SLO.share,
        guess=guess,
        precision=_PRECISION,
        stride=_STRIDE,
    )
