"""Ways to run four GPUs, side by side: the highest rate of each that keeps to an SLO."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from bench.sim.agenda import Agenda
from bench.sim.colocated import Colocated
from bench.sim.figures import SimSlo, good_share
from bench.sim.goodput import PRECISION, highest_rate
from bench.sim.rows import CHUNKS, SPLITS, Row
from bench.sim.shape import ClusterShape
from bench.sim.static_split import StaticSplit
from bench.sim.system import System, run
from bench.sim.tandem import Tandem
from bench.sim.timing import Timing
from bench.sim.trace import TraceRow
from bench.sim.workload import Arrivals, check_arrivals, draw

NUM_GPUS = 4
# Of a whole run: a system that is so far behind is not waited for.
_HORIZON_S = 1e5
# Ours, of which nothing is tuned to a workload: two of the GPUs belong to each pool, and decode
# workers read prompts as far as their steps stay within the gap that is promised (`ours_for`).
OURS = ClusterShape(prefill_workers=2, decode_workers=2)

Make = Callable[[Agenda], System]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests of these lengths, at a rate that is to be found."""

    lengths: Sequence[TraceRow]
    num_requests: int
    slo: SimSlo
    block_size: int = 16
    variation: float = 1.0
    prefixes: bool = False
    seed: int = 1

    def arrivals(self, rate: float) -> Arrivals:
        """At this rate. Raises InvalidRequest."""
        arrivals = Arrivals(
            rate=rate, num_requests=self.num_requests, variation=self.variation, seed=self.seed
        )
        check_arrivals(arrivals)
        return arrivals

    def share_at(self, rate: float, make: Make) -> float:
        """The share of good answers at this rate."""
        requests = draw(
            self.lengths, self.arrivals(rate), block_size=self.block_size, prefixes=self.prefixes
        )
        agenda = Agenda()
        done = run(make(agenda), agenda, requests, horizon_s=_HORIZON_S).outcomes
        return good_share(done, self.slo)

    def goodput(self, make: Make, *, guess: float) -> float:
        """The highest rate that keeps to the SLO."""
        return highest_rate(lambda rate: self.share_at(rate, make), self.slo.share, guess=guess)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One row's goodput in requests per second, by name, and the bound that none can exceed."""

    row: Row
    goodput: Mapping[str, float]
    chunk: int
    ours: float
    bound: float

    @property
    def best(self) -> float:
        """Of the others."""
        return max(self.goodput.values())

    @property
    def ratio(self) -> float:
        """Ours to the best of the others."""
        return self.ours / self.best

    def error(self, name: str) -> float:
        """How far a figure is from the published one, as a share of that."""
        return self.goodput[name] / self.row.published[name] - 1


def compare(row: Row, lengths: Sequence[TraceRow], timing: Timing, ours: ClusterShape) -> Compared:
    """All ways on one row."""
    load = Load(lengths=lengths, num_requests=row.num_requests, slo=row.slo)
    goodput: dict[str, float] = {}
    for prefills, decodes in SPLITS:
        name = f"{prefills}P{decodes}D"
        guess = row.published[name]
        goodput[name] = load.goodput(static_split(prefills, decodes, timing), guess=guess)
    chunk, goodput["colocated"] = best_chunk(
        load, timing, first=row.published_chunk, guess=row.published["colocated"]
    )
    return Compared(
        row=row,
        goodput=goodput,
        chunk=chunk,
        ours=load.goodput(tandem(ours_for(row.slo, ours), timing), guess=max(goodput.values())),
        bound=work_bound(lengths, timing, NUM_GPUS),
    )


def best_chunk(
    load: Load, timing: Timing, *, first: int, guess: float, workers: int = NUM_GPUS
) -> tuple[int, float]:
    """(chunk, goodput) of the best tuned colocated workers."""
    best, goodput = first, load.goodput(colocated(first, timing, workers), guess=guess)
    for chunk in CHUNKS:
        make = colocated(chunk, timing, workers)
        beats = goodput * (1 + PRECISION)
        if chunk != best and load.share_at(beats, make) >= load.slo.share:
            best, goodput = chunk, load.goodput(make, guess=beats)
    return best, goodput


def ours_for(slo: SimSlo, shape: ClusterShape = OURS) -> ClusterShape:
    """The cluster, told what is promised to its clients and nothing else."""
    return replace(shape, itl_target_s=slo.itl_target_s)


def static_split(prefills: int, decodes: int, timing: Timing) -> Make:
    """Pools of fixed size."""
    return lambda agenda: StaticSplit(prefills, decodes, timing, agenda)


def colocated(chunk: int, timing: Timing, workers: int) -> Make:
    """Workers that do everything."""
    return lambda agenda: Colocated(workers, chunk, timing, agenda)


def tandem(shape: ClusterShape, timing: Timing) -> Make:
    """This code's cluster."""
    return lambda agenda: Tandem(shape, timing, agenda)


def work_bound(lengths: Sequence[TraceRow], timing: Timing, workers: int) -> float:
    """Requests per second that no schedule exceeds: their work alone, perfectly shared, no SLO.

    Whole prompts, and each answer's own part of its decode steps; no step's base is counted.
    """
    total_s = 0.0
    for row in lengths:
        steps = row.output_tokens - 1
        context = steps * (row.prompt_tokens + 1) + steps * (steps - 1) / 2
        total_s += timing.prompt_s(0, row.prompt_tokens, whole=True)
        total_s += steps * timing.decode_seq_s + context * timing.decode_token_s
    return workers * len(lengths) / total_s


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive values, at least one."""
    return math.exp(sum(map(math.log, values)) / len(values))
