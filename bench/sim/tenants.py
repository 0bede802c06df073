"""`make simulate-tenants`: what a flood of one tenant costs another one, in virtual time."""

import argparse
import json
import logging
import sys
from dataclasses import asdict, dataclass, replace

import numpy as np
import structlog

from bench.sim.agenda import Agenda
from bench.sim.profile import DEFAULT_PROFILE, load_timing
from bench.sim.request import Outcome, SimRequest
from bench.sim.shape import ClusterShape
from bench.sim.system import run
from bench.sim.tandem import Tandem
from bench.sim.timing import Timing
from bench.sim.trace import TraceRow
from bench.sim.workload import Arrivals, draw
from core.errors import TandemError

WANTED_RATIO = 1.5
_LENGTHS = (TraceRow(600, 60), TraceRow(1200, 100), TraceRow(2400, 40))
_SHAPE = ClusterShape(prefill_workers=1, decode_workers=1, max_new_tokens=100)
_QUIET, _FLOOD = "quiet", "flood"
_QUIET_RATE = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Flooded:
    """p90 TTFT in seconds: the quiet tenant's by itself and beside the flood, and the flood's."""

    alone_s: float
    beside_s: float
    flood_s: float

    @property
    def ratio(self) -> float:
        """Beside the flood to alone."""
        return self.beside_s / self.alone_s


def flooded(timing: Timing, *, flood_rate: float, seconds: float) -> Flooded:
    """One prefill and one decode worker; `flood_rate` requests per second besides the quiet 8."""
    quiet = _load(_QUIET, _QUIET_RATE, seconds, seed=1)
    flood = _load(_FLOOD, flood_rate, seconds, seed=2)
    alone, beside = _run(timing, quiet), _run(timing, [*quiet, *flood])
    return Flooded(
        alone_s=_p90_s(alone, _QUIET),
        beside_s=_p90_s(beside, _QUIET),
        flood_s=_p90_s(beside, _FLOOD),
    )


def _load(tenant: str, rate: float, seconds: float, *, seed: int) -> list[SimRequest]:
    arrivals = Arrivals(rate=rate, num_requests=max(1, int(rate * seconds)), seed=seed)
    return [replace(each, tenant=tenant) for each in draw(_LENGTHS, arrivals, block_size=16)]


def _run(timing: Timing, requests: list[SimRequest]) -> list[Outcome]:
    in_time = sorted(requests, key=lambda each: each.arrival_s)
    agenda = Agenda()
    numbered = [replace(each, index=index) for index, each in enumerate(in_time)]
    return list(run(Tandem(_SHAPE, timing, agenda), agenda, numbered).outcomes)


def _p90_s(outcomes: list[Outcome], tenant: str) -> float:
    return float(np.percentile([o.ttft_s for o in outcomes if o.request.tenant == tenant], 90))


def main() -> int:
    """Prints the figures, and one line of JSON last; 1 where the ratio is above what is wanted."""
    parser = argparse.ArgumentParser(prog="python -m bench.sim.tenants", description=__doc__)
    parser.add_argument("--profile", default=DEFAULT_PROFILE, help="what steps take")
    parser.add_argument("--flood-rate", type=float, default=100.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=10.0, help="for which both ask")
    asked = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    if not (0 < asked.flood_rate < 1e4 and 1 <= asked.seconds <= 3600):
        print("tandem: --flood-rate is 0 to 10,000, and --seconds 1 to 3600", file=sys.stderr)
        return 2
    try:
        found = flooded(
            load_timing(asked.profile), flood_rate=asked.flood_rate, seconds=asked.seconds
        )
    except TandemError as error:
        print(f"tandem: {error.message}", file=sys.stderr)
        return 2
    print(
        f"p90 TTFT: alone {1e3 * found.alone_s:.0f} ms, beside the flood "
        f"{1e3 * found.beside_s:.0f} ms ({found.ratio:.2f} times; wanted: {WANTED_RATIO}), "
        f"the flood's own {1e3 * found.flood_s:.0f} ms"
    )
    print(json.dumps({**asdict(found), "ratio": found.ratio, "wanted_ratio": WANTED_RATIO}))
    return 0 if found.ratio <= WANTED_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
