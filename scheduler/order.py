"""The queue in the order of service: priority with ageing, fair shares, deadlines.

- What lost a placement goes first, in the order of arrival.
- Then by level: a request's priority. One that waited `ageing_s` in its level while a higher one
  had requests moves up to that one, so that no stream of others can hold it back for ever.
- In a level by tenant: deficit round robin, its quantum taken to the limit of nothing, so that the
  tenant goes next that has been given least. Who comes back from idleness begins with the share of
  those who wait: nobody saves up. (Shreedhar and Varghese, SIGCOMM 1995; that prompt and answer
  are both charged is Sheng et al.'s, OSDI 2024.)
- Among a tenant's own by deadline, but a deadline that is further off than `HORIZON_S` counts as
  being that far off: whoever has waited so long is overtaken by no newcomer. A deadline orders only
  its own tenant's requests, else the most impatient tenant would have everybody's share.

Every operation is O(log n); `in_order` costs what is taken from it, and `displaced_by`, which only
a full queue asks, a look at the tenants and at those that came last.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from core.messages import TransferId
from scheduler.view import Waiting

HORIZON_S = 60.0

# (key, number, entry): a heap of entries; number is unique, so that entries are never compared.
_Heap = list[tuple[float, int, "_Entry"]]


@dataclass(slots=True, eq=False)
class _Entry:
    waiting: Waiting
    number: int
    level: int
    # When it came to its level.
    since_s: float
    alive: bool = True


@dataclass(slots=True, eq=False)
class _Lane:
    """One tenant's requests of one level, by deadline. Some of them may be dead."""

    heap: _Heap = field(default_factory=list)
    num_alive: int = 0
    cost: float = 0.0


@dataclass(slots=True, eq=False)
class _Level:
    lanes: dict[str, _Lane] = field(default_factory=dict)
    # (service when pushed, tenant): each lane once, and some that are gone. A service only grows.
    ring: list[tuple[float, str]] = field(default_factory=list)
    in_ring: set[str] = field(default_factory=set)
    # In the order in which they came to the level.
    arrivals: deque[_Entry] = field(default_factory=deque)
    num_alive: int = 0
    cost: float = 0.0


class RequestQueue:
    """The requests that wait for one model."""

    def __init__(self, *, ageing_s: float = 10.0) -> None:
        self._ageing_s = ageing_s
        self._entries: dict[TransferId, _Entry] = {}
        self._again: dict[TransferId, _Entry] = {}  # in the order of arrival
        self._levels: dict[int, _Level] = {}
        self._deadlines: _Heap = []
        # What each tenant was given, in units of `Waiting.cost`; only differences mean anything.
        self._service: dict[str, float] = {}
        self._num_of: dict[str, int] = {}
        self._number = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, transfer: TransferId) -> bool:
        return transfer in self._entries

    @property
    def cost(self) -> float:
        """Of all that wait."""
        return sum(level.cost for level in self._levels.values())

    def add(self, waiting: Waiting) -> None:
        """One more request waits. One that waits already is replaced."""
        self.remove(waiting.transfer)
        self._number += 1
        entry = _Entry(waiting, self._number, -waiting.priority, waiting.enqueued_s)
        self._entries[waiting.transfer] = entry
        heapq.heappush(self._deadlines, (waiting.deadline_s, entry.number, entry))
        if waiting.transfer.attempt > 1:
            self._again[waiting.transfer] = entry
        else:
            self._join(waiting.tenant)
            self._enter(entry)

    def remove(self, transfer: TransferId, *, served: bool = False) -> Waiting | None:
        """Takes a request out, wherever it stands; its tenant is charged where it was served."""
        entry = self._entries.pop(transfer, None)
        if entry is None:
            return None
        entry.alive = False
        waiting = entry.waiting
        if self._again.pop(transfer, None) is None:
            self._leave_level(entry)
            if served:
                self._service[waiting.tenant] += _charge(waiting)
            self._num_of[waiting.tenant] -= 1
            if not self._num_of[waiting.tenant]:
                del self._num_of[waiting.tenant]
        self._sweep()
        return waiting

    def age(self, now_s: float) -> None:
        """Moves up what has waited in a level for too long while a higher one had requests."""
        occupied = sorted(key for key, level in self._levels.items() if level.num_alive)
        for key, above in reversed(list(itertools.pairwise(occupied))):
            arrivals = self._levels[key].arrivals
            while arrivals and (
                not arrivals[0].alive
                or arrivals[0].level != key
                or arrivals[0].since_s + self._ageing_s <= now_s
            ):
                entry = arrivals.popleft()
                if entry.alive and entry.level == key:
                    self._leave_level(entry)
                    entry.level, entry.since_s = above, now_s
                    self._enter(entry)

    def expired(self, now_s: float) -> Iterator[Waiting]:
        """Those whose deadline has passed, wherever they stand."""
        for key, _, entry in _sorted(self._deadlines):
            if key > now_s:
                return
            if entry.alive:
                yield entry.waiting

    def in_order(self, without: frozenset[str] = frozenset()) -> Iterator[Waiting]:
        """The requests as they are to be served, if each of them is, but for some tenants'.

        Changes nothing. The queue must not change while the iterator is in use.
        """
        for entry in self._again.values():
            if entry.waiting.tenant not in without:
                yield entry.waiting
        given: dict[str, float] = {}
        for key in sorted(self._levels, reverse=True):
            yield from self._fair(self._levels[key], given, without)

    def ahead_of(self, waiting: Waiting) -> float:
        """About how much is served before a request that comes now, in units of cost.

        Higher levels whole; of its own level, every tenant's as far as its own tenant's reach.
        """
        ahead = 0.0
        for key, level in self._levels.items():
            if key > -waiting.priority:
                ahead += level.cost
            elif key == -waiting.priority:
                own = level.lanes.get(waiting.tenant)
                own_cost = own.cost if own is not None else 0.0
                others = len(level.lanes) - (1 if own is not None else 0)
                share = own_cost + others * (own_cost + _charge(waiting))
                ahead += min(level.cost, share)
        return ahead

    def displaced_by(self, waiting: Waiting) -> Waiting | None:
        """What makes room in a full queue for a request that comes now; None where nothing does.

        The last that came of the tenant that has most waiting, where that is more than the
        newcomer's tenant would have; never one of a higher level, or one that lost a placement.
        """
        if not self._num_of:
            return None
        most = max(self._num_of, key=self._num_of.__getitem__)
        if self._num_of[most] <= self._num_of.get(waiting.tenant, 0) + 1:
            return None
        for key in sorted(key for key in self._levels if key <= -waiting.priority):
            level = self._levels[key]
            if most in level.lanes:
                return next(
                    entry.waiting
                    for entry in reversed(level.arrivals)
                    if entry.alive and entry.level == key and entry.waiting.tenant == most
                )
        return None

    # --- the parts -----------------------------------------------------------------------------

    def _join(self, tenant: str) -> None:
        """A tenant that waited for nothing begins with the least that those have who wait."""
        if tenant not in self._num_of:
            floor = self._least_service()
            self._service[tenant] = max(self._service.get(tenant, 0.0), floor)
        self._num_of[tenant] = self._num_of.get(tenant, 0) + 1

    def _least_service(self) -> float:
        """Of the tenants that wait; where none does, of nobody: 0, and old shares are forgotten."""
        heads = []
        for level in self._levels.values():
            self._settle_ring(level)
            if level.ring:
                heads.append(level.ring[0][0])
        if not heads:
            self._service.clear()
            return 0.0
        return min(heads)

    def _settle_ring(self, level: _Level) -> None:
        """Makes the ring's head a tenant that waits, with what it was given by now."""
        ring = level.ring
        while ring:
            pushed, tenant = ring[0]
            if tenant not in level.lanes:
                heapq.heappop(ring)
                level.in_ring.discard(tenant)
            elif (service := self._service[tenant]) > pushed:
                heapq.heapreplace(ring, (service, tenant))
            else:
                return

    def _enter(self, entry: _Entry) -> None:
        waiting = entry.waiting
        level = self._levels.setdefault(entry.level, _Level())
        lane = level.lanes.get(waiting.tenant)
        if lane is None:
            lane = level.lanes[waiting.tenant] = _Lane()
            if waiting.tenant not in level.in_ring:
                level.in_ring.add(waiting.tenant)
                heapq.heappush(level.ring, (self._service[waiting.tenant], waiting.tenant))
        key = min(waiting.deadline_s, waiting.enqueued_s + HORIZON_S)
        heapq.heappush(lane.heap, (key, entry.number, entry))
        level.arrivals.append(entry)
        lane.num_alive += 1
        level.num_alive += 1
        lane.cost += waiting.cost
        level.cost += waiting.cost

    def _leave_level(self, entry: _Entry) -> None:
        """Takes a living or dying entry off its level's books; its place in the heap dies later."""
        waiting = entry.waiting
        level = self._levels[entry.level]
        lane = level.lanes[waiting.tenant]
        lane.num_alive -= 1
        level.num_alive -= 1
        lane.cost -= waiting.cost
        level.cost -= waiting.cost
        while lane.heap and not lane.heap[0][2].alive:
            heapq.heappop(lane.heap)
        if not lane.num_alive:
            del level.lanes[waiting.tenant]
            self._settle_ring(level)
        elif len(lane.heap) > 2 * lane.num_alive + 16:
            level_key = entry.level
            lane.heap = [each for each in lane.heap if each[2].alive and each[2].level == level_key]
            heapq.heapify(lane.heap)
        if not level.num_alive:
            del self._levels[entry.level]
        elif len(level.arrivals) > 2 * level.num_alive + 16:
            level.arrivals = deque(
                each for each in level.arrivals if each.alive and each.level == entry.level
            )

    def _sweep(self) -> None:
        while self._deadlines and not self._deadlines[0][2].alive:
            heapq.heappop(self._deadlines)
        if len(self._deadlines) > 2 * len(self._entries) + 16:
            self._deadlines = [each for each in self._deadlines if each[2].alive]
            heapq.heapify(self._deadlines)

    def _fair(
        self, level: _Level, given: dict[str, float], without: frozenset[str]
    ) -> Iterator[Waiting]:
        """A level's requests, each time of the tenant that would have been given least by then.

        `given` is what the requests before these are charged. Walks the ring as far as it is
        needed: most calls look at the first few requests only.
        """
        ring = level.ring
        # (service, tenant, place in the ring; -1 once its requests are being given)
        next_up: list[tuple[float, str, int]] = [(*ring[0], 0)] if ring else []
        lanes: dict[str, Iterator[tuple[float, int, _Entry]]] = {}
        while next_up:
            service, tenant, place = heapq.heappop(next_up)
            if place >= 0:
                for child in (2 * place + 1, 2 * place + 2):
                    if child < len(ring):
                        heapq.heappush(next_up, (*ring[child], child))
                if tenant not in level.lanes or tenant in lanes or tenant in without:
                    continue
                lanes[tenant] = _sorted(level.lanes[tenant].heap)
                by_now = self._service[tenant] + given.get(tenant, 0.0)
                if by_now > service:
                    heapq.heappush(next_up, (by_now, tenant, -1))
                    continue
            for _, _, entry in lanes[tenant]:
                if entry.alive and self._levels.get(entry.level) is level:
                    charge = _charge(entry.waiting)
                    given[tenant] = given.get(tenant, 0.0) + charge
                    yield entry.waiting
                    heapq.heappush(next_up, (service + charge, tenant, -1))
                    break


def _charge(waiting: Waiting) -> float:
    """At least a little, so that everybody's turn passes."""
    return max(waiting.cost, 1.0)


def _sorted(heap: _Heap) -> Iterator[tuple[float, int, _Entry]]:
    """A heap's items in order, without changing it: k of them cost O(k log k)."""
    ahead = [(*heap[0][:2], 0)] if heap else []
    while ahead:
        _, _, place = heapq.heappop(ahead)
        yield heap[place]
        for child in (2 * place + 1, 2 * place + 2):
            if child < len(heap):
                heapq.heappush(ahead, (*heap[child][:2], child))
