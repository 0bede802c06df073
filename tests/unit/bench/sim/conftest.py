"""Loads and clusters that the simulator's tests share."""

from collections.abc import Callable, Sequence

import pytest

from bench.sim.agenda import Agenda
from bench.sim.profile import load_timing
from bench.sim.request import SimRequest
from bench.sim.shape import ClusterShape
from bench.sim.system import Run, run
from bench.sim.tandem import Death, Tandem
from bench.sim.timing import Timing
from bench.sim.trace import TraceRow
from bench.sim.workload import Arrivals, draw

# Lengths as chats have them: most short, few long.
LENGTHS = ((374, 44), (1200, 109), (90, 300), (2600, 60), (6000, 25), (20, 12))

Load = Callable[..., list[SimRequest]]
RunTandem = Callable[..., tuple[Tandem, Run]]


@pytest.fixture(scope="session")
def h100() -> Timing:
    return load_timing("h100-llama-3.1-8b")


@pytest.fixture(scope="session")
def load() -> Load:
    """Requests of mixed lengths: `load(rate, number, seed=1)`."""
    rows = [TraceRow(prompt, answer) for prompt, answer in LENGTHS]

    def make(rate: float, num_requests: int, *, seed: int = 1) -> list[SimRequest]:
        arrivals = Arrivals(rate=rate, num_requests=num_requests, seed=seed)
        return draw(rows, arrivals, block_size=16)

    return make


@pytest.fixture(scope="session")
def run_tandem(h100: Timing) -> RunTandem:
    """Runs a cluster of this code: one prefill worker and two decode workers unless told."""

    def do(
        requests: list[SimRequest],
        shape: ClusterShape | None = None,
        *,
        timing: Timing = h100,
        deaths: Sequence[Death] = (),
    ) -> tuple[Tandem, Run]:
        agenda = Agenda()
        shape = shape or ClusterShape(prefill_workers=1, decode_workers=2)
        system = Tandem(shape, timing, agenda, deaths=deaths)
        return system, run(system, agenda, requests)

    return do
