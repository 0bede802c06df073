"""A way to run a cluster, and one run of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from bench.sim.agenda import Agenda
from bench.sim.request import Outcome, SimRequest
from bench.sim.worker import SimWorker


class System(Protocol):
    """Takes requests as they arrive, and sees to it that each is over some day."""

    @property
    def workers(self) -> Sequence[SimWorker]: ...

    def start(self) -> None:
        """Before the first request."""

    def submit(self, outcome: Outcome) -> None:
        """A request arrives now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What came of a load. `steps` are those of all workers.

    `busy_share` is of the time until the last arrival: what follows is the load's end.
    """

    outcomes: Sequence[Outcome]
    duration_s: float
    steps: int
    busy_share: Mapping[str, float]
    kv_share: Mapping[str, float]
    preemptions: int


def run(
    system: System,
    agenda: Agenda,
    requests: Sequence[SimRequest],
    *,
    horizon_s: float = 1e6,
    hopeless: Callable[[Outcome], bool] = lambda outcome: False,
) -> Run:
    """Until every request is over, or one that is makes the rest not worth running.

    `hopeless` is asked of each that is over, in the order of their arrival. Raises InvalidRequest
    where some are never over.
    """
    outcomes = [Outcome(request) for request in requests]
    system.start()
    pending = iter(outcomes)
    busy_s: dict[str, float] = {}

    def arrive(outcome: Outcome) -> None:
        following = next(pending, None)
        if following is not None:
            agenda.at(following.request.arrival_s, arrive, following)
        else:
            busy_s.update({worker.name: worker.busy_s for worker in system.workers})
        system.submit(outcome)

    first = next(pending)
    agenda.at(first.request.arrival_s, arrive, first)
    last, over = 0, False

    def all_over() -> bool:
        nonlocal last, over
        while not over and last < len(outcomes) and outcomes[last].over:
            over = hopeless(outcomes[last])
            last += 1
        return over or last == len(outcomes)

    agenda.run(until=all_over, horizon_s=horizon_s)
    ended_s = max([agenda.now_s, *(o.finished_s for o in outcomes if o.finished_s is not None)])
    duration_s = max(ended_s - requests[0].arrival_s, 1e-9)
    arriving_s = max(requests[-1].arrival_s - requests[0].arrival_s, 1e-9)
    return Run(
        outcomes=outcomes,
        duration_s=duration_s,
        steps=sum(worker.steps for worker in system.workers),
        busy_share={name: min(1.0, seconds / arriving_s) for name, seconds in busy_s.items()},
        kv_share={
            each.name: 1 - each.least_available / each.shape.num_blocks for each in system.workers
        },
        preemptions=sum(worker.preemptions for worker in system.workers),
    )
