"""Who serves which role: the pure controller that turns workers between prefill and decode.

`steer` is given the workers, what is asked of both pools in workers' worth (`scheduler.demand`),
what the operator wants, and what it remembered the last time. It gives one turn at most, and how
many workers of each role the demand could use, for whoever starts and stops processes.

The pressure of a split is the load of its busier pool, per worker. A turn is worth what it costs
where another split's pressure is clearly lower, has been for a while, and somebody is busy at all.
Since turns only ever lead towards the split with the least pressure, one at a time, and stop where
the gain is small, a demand that stands still is answered by a few turns at most, and then by none.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from core.messages import WorkerRole
from scheduler.demand import Loads

# What a decode worker reads in a second, to what a prefill worker does: in pieces, beside its base.
READ_BESIDE = 2 / 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How many workers serve each role."""

    prefill: int
    decode: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticSettings:
    """What the operator wants."""

    min_prefill: int = 1
    max_prefill: int = 64
    min_decode: int = 1
    max_decode: int = 64
    # By how much less another split's pressure must be, as a share, and for how long.
    hysteresis: float = 0.2
    patience_s: float = 10.0
    # From the end of one turn to the next.
    cooldown_s: float = 15.0
    # Below this pressure nobody is late whatever the split.
    busy: float = 0.4
    # The load that a worker of a pool of the wanted size would have.
    utilisation: float = 0.7
    # Decode workers read prompts, too: what they do not decode is not lost.
    decoders_read: bool = False
    # A person's choice: nothing else counts then. None: the demand decides.
    override: Split | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolWorker:
    """One worker that can serve either role. Blocks are of its KV pool."""

    name: str
    # The role that it serves, or is being turned to.
    role: WorkerRole
    # It was told to turn and has not finished.
    turning: bool = False
    # It can serve no other role.
    fixed: bool = False
    # Requests that are placed on it.
    num_placed: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0


class Why(StrEnum):
    """What a turn is for."""

    OVERRIDE = "override"
    BOUNDS = "bounds"
    EMPTY = "empty pool"
    DEMAND = "demand"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """This worker is to serve that role."""

    worker: str
    role: WorkerRole
    why: Why


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What should happen. `wanted` is for the demand alone, however many workers there are.

    `target` is the split that turns lead to; None where there is nothing to split.
    """

    wanted: Split
    target: Split | None = None
    turn: Turn | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What one call leaves for the next. Times are on the scheduler's clock."""

    # Since when the same other role has been short of a worker.
    short: WorkerRole | None = None
    short_since_s: float = 0.0
    # When a worker was last seen turning, or told to.
    turned_s: float = -math.inf


def steer(
    workers: Sequence[PoolWorker],
    loads: Loads | None,
    settings: ElasticSettings,
    memory: Memory,
    *,
    now_s: float,
) -> tuple[Wishes, Memory]:
    """What to do now, and what to remember. `loads` is None where no step was measured yet."""
    workers = sorted(workers, key=lambda each: each.name)
    wishes = Wishes(wanted=wanted(loads, settings))
    num_prefill = sum(1 for each in workers if each.role is WorkerRole.PREFILL)
    allowed = _allowed(len(workers), settings)
    if not allowed:
        return wishes, replace(memory, short=None)
    num_target, why = _target(num_prefill, len(workers), allowed, loads, settings)
    wishes = replace(wishes, target=Split(prefill=num_target, decode=len(workers) - num_target))
    if any(each.turning for each in workers):
        return wishes, replace(memory, short=None, turned_s=now_s)
    if num_target == num_prefill:
        return wishes, replace(memory, short=None)
    short = WorkerRole.PREFILL if num_target > num_prefill else WorkerRole.DECODE
    if memory.short is not short:
        memory = replace(memory, short=short, short_since_s=now_s)
    if not _is_time(why, settings, memory, now_s):
        return wishes, memory
    chosen = _choose(workers, short, needs_room=why is Why.DEMAND)
    if chosen is None:
        return wishes, memory
    turn = Turn(worker=chosen.name, role=short, why=why)
    return replace(wishes, turn=turn), replace(memory, short=None, turned_s=now_s)


def wanted(loads: Loads | None, settings: ElasticSettings) -> Split:
    """How many workers of each role the demand could use, within the bounds."""
    loads = loads or Loads(prefill=0.0, decode=0.0)
    return Split(
        prefill=_clamp(
            math.ceil(loads.prefill / settings.utilisation),
            settings.min_prefill,
            settings.max_prefill,
        ),
        decode=_clamp(
            math.ceil(loads.decode / settings.utilisation), settings.min_decode, settings.max_decode
        ),
    )


def pressure(
    num_prefill: int, num_decode: int, loads: Loads, *, decoders_read: bool = False
) -> float:
    """The load of a worker of the busier pool; 1 is all that it can do.

    Where decode workers read prompts beside their answers, the reading is spread over all workers
    so far as that leaves none of them busier than the others, a little less well there.
    """
    decoding = loads.decode / num_decode
    if not decoders_read:
        return max(loads.prefill / num_prefill, decoding)
    reading = loads.prefill + READ_BESIDE * loads.decode
    return max(reading / (num_prefill + READ_BESIDE * num_decode), decoding)


def _allowed(num_workers: int, settings: ElasticSettings) -> range:
    """Numbers of prefill workers that keep both roles served and within their bounds."""
    least = max(1, settings.min_prefill, num_workers - settings.max_decode)
    most = min(num_workers - 1, settings.max_prefill, num_workers - settings.min_decode)
    return range(least, most + 1)


def _target(
    num_prefill: int,
    num_workers: int,
    allowed: range,
    loads: Loads | None,
    settings: ElasticSettings,
) -> tuple[int, Why]:
    """How many prefill workers there should be, and for what reason."""
    nearest = _clamp(num_prefill, allowed[0], allowed[-1])
    override = settings.override
    if override is not None:
        # Where a worker is missing it comes back: the others do not take turns meanwhile.
        if num_workers >= override.prefill + override.decode:
            return _clamp(override.prefill, allowed[0], allowed[-1]), Why.OVERRIDE
        return nearest, Why.EMPTY if num_prefill in (0, num_workers) else Why.BOUNDS
    if nearest != num_prefill:
        return nearest, Why.EMPTY if num_prefill in (0, num_workers) else Why.BOUNDS
    if loads is None:
        return num_prefill, Why.DEMAND

    def pressure_of(number: int) -> float:
        return pressure(number, num_workers - number, loads, decoders_read=settings.decoders_read)

    present = pressure_of(num_prefill)
    # Of equal ones the nearest, then the one with fewer prefill workers.
    best = min(allowed, key=lambda n: (pressure_of(n), abs(n - num_prefill), n))
    if present < settings.busy or pressure_of(best) > (1 - settings.hysteresis) * present:
        return num_prefill, Why.DEMAND
    return best, Why.DEMAND


def _is_time(why: Why, settings: ElasticSettings, memory: Memory, now_s: float) -> bool:
    """A person need not wait. A pool that is empty or wrong may be a worker that starts again."""
    if why is Why.OVERRIDE:
        return True
    rested = now_s - memory.turned_s >= settings.cooldown_s
    return rested and now_s - memory.short_since_s >= settings.patience_s


def _choose(
    workers: Sequence[PoolWorker], short: WorkerRole, *, needs_room: bool
) -> PoolWorker | None:
    """Of the other role, the worker with the least to hand over; None where it has no place to go.

    What a decode worker holds must fit beside what its peers hold.
    """
    peers = [each for each in workers if each.role is not short]
    free = sum(each.num_free_blocks for each in peers)
    able = [each for each in peers if not each.fixed]
    for each in sorted(able, key=lambda peer: (peer.num_placed, peer.name)):
        held = each.num_blocks - each.num_free_blocks
        if short is WorkerRole.DECODE or not needs_room or held <= free - each.num_free_blocks:
            return each
    return None


def _clamp(value: int, least: int, most: int) -> int:
    return max(least, min(value, most))
