"""Which worker to add or remove, from what the scheduler's elastic controller wishes: pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

WorkerRole = Literal["prefill", "decode"]
ROLES: tuple[WorkerRole, ...] = ("prefill", "decode")
# So many looks in a row must want the same before anything is done.
PATIENCE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How many workers there may be of each role; `most` also holds for what the cluster has."""

    least: Mapping[WorkerRole, int]
    most: Mapping[WorkerRole, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A worker that serves, by name. `num_placed` requests are on it."""

    name: str
    role: WorkerRole
    num_placed: int
    leaving: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One step: a worker of this role more, or the named one less."""

    role: WorkerRole
    remove: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """What one look leaves for the next."""

    change: Change | None = None
    looks: int = 0


def read(found: Mapping[str, Any]) -> tuple[list[Seen], dict[WorkerRole, int]]:
    """The workers and the wanted numbers out of the scheduler's /scale. Raises ValueError."""
    try:
        wanted: dict[WorkerRole, int] = {role: int(found["wanted"][role]) for role in ROLES}
        seen = [
            Seen(
                name=str(each["worker"]).partition("/")[0],
                role="prefill" if each["role"] == "prefill" else "decode",
                num_placed=int(each["num_placed"]),
                leaving=bool(each["draining"] or each["turning"]),
            )
            for each in found["workers"]
        ]
    except (LookupError, TypeError) as error:
        raise ValueError(f"/scale lacks {error}") from error
    return seen, wanted


def next_change(
    workers: Sequence[Seen],
    wanted: Mapping[WorkerRole, int],
    bounds: Bounds,
    patience: Patience,
    *,
    num_coming: int = 0,
) -> tuple[Change | None, Patience]:
    """One change at most, and what to remember.

    Nothing is done while a worker comes (`num_coming`), leaves or turns: what is wanted then is
    judged by workers that are not what they will be. Of those to leave, the one with the fewest
    requests goes.
    """
    if num_coming or any(worker.leaving for worker in workers):
        return None, Patience()
    change = _towards(workers, wanted, bounds)
    if change is None:
        return None, Patience()
    again = patience.change is not None and _kind(patience.change) == _kind(change)
    patience = Patience(change=change, looks=patience.looks + 1 if again else 1)
    return (change, Patience()) if patience.looks >= PATIENCE else (None, patience)


def _kind(change: Change) -> tuple[WorkerRole, bool]:
    """What must be wanted several times: whichever worker it is that leaves."""
    return change.role, change.remove is None


def _towards(
    workers: Sequence[Seen], wanted: Mapping[WorkerRole, int], bounds: Bounds
) -> Change | None:
    surplus: Change | None = None
    for role in ROLES:
        mine = sorted(
            (each for each in workers if each.role == role),
            key=lambda each: (each.num_placed, each.name),
        )
        goal = min(max(wanted[role], bounds.least[role]), bounds.most[role])
        if len(mine) < goal:  # what is lacking comes before what is too much
            return Change(role=role)
        if len(mine) > goal and surplus is None:
            surplus = Change(role=role, remove=mine[0].name)
    return surplus
