"""`make simulate-check`: a cluster on this machine, and the simulator calibrated to it, compared.

Starts a cluster, calibrates, then sends it loads of a part of what it can do, and simulates the
same requests at the same times. The machine should do nothing else.
"""

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import structlog

from bench.cluster import ALWAYS_HAND_OVER, serving
from bench.load.client import Target, find_target
from bench.load.measure import measure, warm_up
from bench.load.plan import LoadPlan, Place
from bench.load.summary import Distribution
from bench.load.workloads import Shape
from bench.sim.agenda import Agenda
from bench.sim.calibrate import calibrate
from bench.sim.request import SimRequest
from bench.sim.shape import ClusterShape
from bench.sim.system import run
from bench.sim.tandem import Tandem
from bench.sim.timing import Timing
from core.errors import TandemError

LOADS = (0.3, 0.6, 0.85)
_BLOCK_SIZE = 16
# A cluster's defaults, as far as the simulator has them.
_SHAPE = ClusterShape(
    prefill_step_tokens=512,
    decode_step_tokens=512,
    max_seqs=64,
    itl_target_s=0.05,
    local_prefill="never",
    block_size=_BLOCK_SIZE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """Milliseconds."""

    ttft_p50: float
    ttft_p90: float
    tpot_p50: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCheck:
    """One load, as it was and as it was simulated."""

    load: float
    rate: float
    live: Latencies
    simulated: Latencies

    def off(self) -> dict[str, float]:
        """How far each simulated figure is from the live one, as a share of that."""
        live, simulated = asdict(self.live), asdict(self.simulated)
        return {name: simulated[name] / live[name] - 1 for name in live}


def main() -> int:
    """Prints a table, and one line of JSON last. Exits with 1 where a figure is too far off."""
    parser = argparse.ArgumentParser(prog="python -m bench.sim.check", description=__doc__)
    parser.add_argument("--requests", type=int, default=60, help="of each load")
    parser.add_argument("--input-len", type=int, default=384)
    parser.add_argument("--output-len", type=int, default=48)
    parser.add_argument("--within", type=float, default=0.15, help="the share that is near enough")
    asked = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    try:
        checks, timing = _check(asked.requests, asked.input_len, asked.output_len)
    except TandemError as error:
        print(f"tandem: {error.message}", file=sys.stderr)
        return 2
    off = [max(abs(share) for share in check.off().values()) for check in checks]
    print(_table(checks))
    document = {
        "checks": [{**asdict(check), "off": check.off()} for check in checks],
        "timing": asdict(timing),
        "within": asked.within,
        "near_enough": max(off) <= asked.within,
    }
    print(json.dumps(document))
    return 0 if max(off) <= asked.within else 1


def _check(num_requests: int, prompt: int, answer: int) -> tuple[list[LoadCheck], Timing]:
    with serving(ALWAYS_HAND_OVER) as cluster:
        target = find_target(cluster.http)
        timing = calibrate(
            target, cluster.admin, block_size=_BLOCK_SIZE, name="this machine", tell=_tell
        )
        capacity = _capacity(timing, prompt, answer)
        checks = []
        for number, load in enumerate(LOADS):
            plan = LoadPlan(
                num_requests=num_requests,
                rate=load * capacity,
                num_warmup=2,
                shape=Shape(input_len=prompt, output_len=answer),
            ).checked()
            checks.append(_one(target, timing, plan, Place(seed=1, round=number), load))
            _tell(f"load {load:.0%}: {checks[-1].off()}")
    return checks, timing


def _one(target: Target, timing: Timing, plan: LoadPlan, place: Place, load: float) -> LoadCheck:
    assert plan.rate is not None
    warm_up(target, plan, place)
    live = measure(target, plan, place).summary
    arrivals_s = plan.arrivals_s(place)
    shape = plan.shape
    assert shape.input_len is not None and shape.output_len is not None
    outcomes = _simulated(timing, arrivals_s, shape.input_len, shape.output_len)
    return LoadCheck(
        load=load,
        rate=plan.rate,
        live=_latencies(live.ttft_ms, live.tpot_ms),
        simulated=_latencies(*outcomes),
    )


def _simulated(
    timing: Timing, arrivals_s: Sequence[float], prompt: int, answer: int
) -> tuple[Distribution | None, Distribution | None]:
    agenda = Agenda()
    requests = [
        SimRequest(index=i, arrival_s=at_s, prompt_tokens=prompt, output_tokens=answer)
        for i, at_s in enumerate(arrivals_s)
    ]
    done = run(Tandem(_SHAPE, timing, agenda), agenda, requests).outcomes
    return (
        Distribution.of_seconds(outcome.ttft_s for outcome in done),
        Distribution.of_seconds(outcome.tpot_s for outcome in done),
    )


def _capacity(timing: Timing, prompt: int, answer: int) -> float:
    """Requests per second of a flood, as the simulator has it."""
    agenda = Agenda()
    requests = [
        SimRequest(index=i, arrival_s=0.0, prompt_tokens=prompt, output_tokens=answer)
        for i in range(60)
    ]
    return len(requests) / run(Tandem(_SHAPE, timing, agenda), agenda, requests).duration_s


def _latencies(ttft: Distribution | None, tpot: Distribution | None) -> Latencies:
    if ttft is None or tpot is None:
        raise TandemError("no request was answered")
    return Latencies(ttft_p50=ttft.p50, ttft_p90=ttft.p90, tpot_p50=tpot.p50)


def _table(checks: Sequence[LoadCheck]) -> str:
    lines = [f"{'load':>5} {'req/s':>6}  {'ms':10}{'live':>9}{'simulated':>11}{'off':>8}"]
    for check in checks:
        for name, off in check.off().items():
            live, simulated = getattr(check.live, name), getattr(check.simulated, name)
            figures = f"{name:10}{live:9.1f}{simulated:11.1f}{off:8.1%}"
            lines.append(f"{check.load:5.0%} {check.rate:6.2f}  {figures}")
    return "\n".join(lines)


def _tell(line: str) -> None:
    print(line, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
