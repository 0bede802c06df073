"""The desk with a full queue: what one placement costs, from the order to the signed ticket."""

import statistics
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from bench.scheduler import fakes
from core.config import SchedulerConfig
from core.messages import (
    GatewayHello,
    Placement,
    PlacementMessage,
    Prefilled,
    Settle,
    WorkerRef,
    WorkerRole,
)
from core.tickets import Tickets
from scheduler.desk import SchedulerDesk
from scheduler.policy import Decision
from scheduler.view import ClusterView

_SEQS = 64
_BLOCKS = 50_000
# Between two requests that end, on the desk's clock. Prefill workers are then what all wait for,
# and each that is free again is given one prompt, with room on every decode worker to choose from.
_TICK_S = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class DeskFigures:
    """Microseconds a placement.

    Of the policy in the median call, and in the tenth part of the calls that was disturbed least;
    of all that a request costs from its arrival to its end, the mean.
    """

    policy_us: float
    policy_us_p10: float
    desk_us: float


class _Timed(SchedulerDesk):
    """Knows how long the policy alone took for each placement."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.took_s: list[float] = []

    def _decide(self, view: ClusterView, now_s: float) -> list[Decision]:
        started_s = time.perf_counter()
        decisions = super()._decide(view, now_s)
        if decisions:
            self.took_s.append((time.perf_counter() - started_s) / len(decisions))
        return decisions


def measure(
    *, num_queued: int, num_workers: int, num_placements: int, together: int
) -> DeskFigures:
    """Requests end and are replaced by new ones, so many `together`; then the policy is called.

    One by one it is called as often as it ever is. At the rates where its cost matters, what
    arrives meanwhile is handled at once: a stream brings up to 64 messages in one.
    """
    now_s = 0.0
    desk = _Timed(
        SchedulerConfig(max_queued=num_queued + num_placements),
        fakes.MODEL,
        Tickets(bytes(32)),
        lambda: now_s,
    )
    placed: list[Placement] = []

    def reply(message: PlacementMessage) -> bool:
        if isinstance(message, Placement):
            placed.append(message)
        return True

    desk.gateway_says("g", GatewayHello(gateway=WorkerRef(name="g", incarnation="1")), reply)
    for number in range(num_workers):
        role = WorkerRole.PREFILL if number % 2 else WorkerRole.DECODE
        hello = fakes.hello(role, number, num_blocks=_BLOCKS, max_seqs=_SEQS)
        member = desk.worker_joined(hello)
        desk.worker_says(member, fakes.load(_BLOCKS))
        desk.worker_cached(member, fakes.cached(number))
    asked = 0
    for _ in range(num_queued):
        desk.gateway_says("g", fakes.enqueue(asked), reply)
        asked += 1
    desk.decide_now()
    new = [fakes.enqueue(asked + number) for number in range(num_placements)]
    running = deque(placed)
    placed.clear()
    num_placed = 0
    desk.took_s.clear()
    started_s = time.process_time()
    for number, enqueue in enumerate(new):
        now_s += _TICK_S
        ended = running.popleft()
        desk.gateway_says("g", Prefilled(transfer=ended.transfer), reply)
        desk.gateway_says("g", Settle(transfer=ended.transfer), reply)
        desk.gateway_says("g", enqueue, reply)
        if number % together:
            continue
        desk.decide_now()
        num_placed += len(placed)
        running += placed
        placed.clear()
    took_s = time.process_time() - started_s
    return DeskFigures(
        policy_us=statistics.median(desk.took_s) * 1e6,
        policy_us_p10=statistics.quantiles(desk.took_s, n=10)[0] * 1e6,
        desk_us=took_s / num_placed * 1e6,
    )
