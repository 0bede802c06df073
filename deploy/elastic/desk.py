"""Both desks of a worker over one engine host, and the role in which the scheduler sees it.

Both serve all the time: a role only says what is newly placed here. So a turn moves no memory and
stops nothing. To prefill: the worker says hello as a prefill worker, then gives its running answers
up. Each goes on at another decode worker, which may ask this one for the prompt and the answer so
far: their blocks are in the prefix cache still, and travel by the ordinary hand-off. To decode: it
says hello as a decode worker, and the prompts that it has are read to their end beside.

A worker that leaves lends itself as a prefill worker in the same way, until its answers have gone.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any

import structlog

from core.messages import CacheNews, WorkerLoad, WorkerRole
from core.messages import Counter as Count
from core.registration import Registration
from decode_worker.desk import DecodeDesk
from prefill_worker.desk import PrefillDesk

# Within which the scheduler answers a hello.
_HEARD_S = 2.0
# Within which answers that were given up, and are to take their blocks from here, come for them.
_FETCHED_S = 3.0
# Counters that both desks read off the one pool.
_OF_THE_POOL = frozenset({"blocks_evicted"})


class ElasticDesk:
    """`core.worker_service.Desk` and `Turning`. `role` is how it is registered."""

    def __init__(
        self,
        decode: DecodeDesk,
        prefill: PrefillDesk,
        role: WorkerRole,
        *,
        reads_prompts: bool,
        turn_timeout_s: float,
    ) -> None:
        """A turn is over after `turn_timeout_s` at the latest, with whatever then is left."""
        self.role = role
        self._decode = decode
        self._prefill = prefill
        self._reads_prompts = reads_prompts
        self._turn_timeout_s = turn_timeout_s
        self._registration: Registration | None = None
        self._tasks = asyncio.TaskGroup()
        self._one_turn = asyncio.Lock()
        self._num_turns = 0  # begun, and waiting for their beginning
        self._leaving = self._lent = False
        # Requests that were given up and have not come for their blocks.
        self._expected: set[str] = set()
        self._fetched = asyncio.Event()
        prefill.on_accepted = self._came
        if role is WorkerRole.PREFILL:
            decode.draining = True
        self._log = structlog.get_logger()

    # --- the worker's service ------------------------------------------------------------------

    async def run(self) -> None:
        """Serves in both roles until cancelled."""
        async with self._tasks:
            self._tasks.create_task(self._decode.run())
            self._tasks.create_task(self._prefill.run())

    def registered(self, registration: Registration) -> None:
        """By what it says which role it serves."""
        self._registration = registration

    def report_when_it_matters(self, report_now: Callable[[], None]) -> None:
        """Calls this where the scheduler should hear at once how the worker is loaded."""
        self._decode.report_when_it_matters(report_now)
        self._prefill.report_when_it_matters(report_now)

    @property
    def stalled_s(self) -> float:
        """For how long a step loop has had work and has not come round."""
        return max(self._decode.stalled_s, self._prefill.stalled_s)

    def not_ready(self) -> str | None:
        """Why no work is taken now; None where some is."""
        if self._leaving:
            return "it is draining"
        return self._own.not_ready()

    def leases(self) -> Mapping[str, int]:
        """Requests by the state of their hand-off's machine, of both kinds."""
        return Counter(self._decode.leases()) + Counter(self._prefill.leases())

    def cache_news(self, whole: bool) -> CacheNews:
        """What the one prefix cache holds, or what it has gained and lost since the last news."""
        return self._decode.cache_news(whole)

    def load(self) -> WorkerLoad:
        """What the scheduler is told: costs and speeds of the present role, the rest of both."""
        own, other = self._own.load(), self._other.load()
        counts: Counter[str] = Counter()
        for count in (*own.counters, *other.counters):
            if count.name not in _OF_THE_POOL:
                counts[count.name] += count.value
        counts.update({each.name: each.value for each in own.counters if each.name in _OF_THE_POOL})
        return replace(
            own,
            num_running=own.num_running + other.num_running,
            num_waiting=own.num_waiting + other.num_waiting,
            num_preempted=own.num_preempted + other.num_preempted,
            backlog_tokens=own.backlog_tokens + other.backlog_tokens,
            draining=self._leaving and not self._lent,
            turning=self._num_turns > 0 or self._lent,
            counters=tuple(Count(name=name, value=n) for name, n in sorted(counts.items())),
        )

    @property
    def _own(self) -> DecodeDesk | PrefillDesk:
        return self._prefill if self.role is WorkerRole.PREFILL else self._decode

    @property
    def _other(self) -> DecodeDesk | PrefillDesk:
        return self._decode if self.role is WorkerRole.PREFILL else self._prefill

    # --- turns ---------------------------------------------------------------------------------

    def turn(self, role: WorkerRole) -> None:
        """Serves this role from now on. A turn in progress ends first."""
        self._num_turns += 1
        self._tasks.create_task(self._turn(role))

    async def _turn(self, role: WorkerRole) -> None:
        try:
            async with self._one_turn:
                if role is self.role or self._leaving:
                    return
                if role is WorkerRole.PREFILL:
                    await self._become_prefill()
                else:
                    self._decode.take_work()
                    await self._say(role)
                    self._log.info("turned", role="decode")
            await self._within(self._turn_timeout_s, self._other.idle(), "what it held")
        finally:
            self._num_turns -= 1
            self._report()

    async def _become_prefill(self) -> tuple[str, ...]:
        """Has the scheduler know first who may read what is then given up; gives what was."""
        self._decode.draining = True
        await self._say(WorkerRole.PREFILL)
        given_up = self._decode.hand_over()
        self._log.info("turned", role="prefill", handed_over=len(given_up))
        return given_up

    async def _say(self, role: WorkerRole) -> None:
        assert self._registration is not None
        self.role = role
        reads_prompts = self._reads_prompts and role is WorkerRole.DECODE
        self._registration.become(role, local_prefill=reads_prompts)
        await self._within(_HEARD_S, self._registration.known.wait(), "the scheduler")

    # --- leaving -------------------------------------------------------------------------------

    async def drained(self) -> None:
        """Returns once nothing is left. New work is refused from now on."""
        self._leaving = True
        self._decode.draining = True
        await self._decode.idle()
        async with self._one_turn:  # blocks may still be fetched
            await self._prefill.drained()

    def hand_over(self) -> None:
        """It leaves, and its peers take what it decodes. Asked again: whatever is left, at once."""
        if self._lent or self.role is WorkerRole.PREFILL:
            self._decode.hand_over()
            return
        self._lent = True
        self._tasks.create_task(self._lend())

    async def _lend(self) -> None:
        try:
            async with self._one_turn:
                self._fetched.clear()
                self._expected = set(await self._become_prefill())
                if self._expected:
                    await self._within(_FETCHED_S, self._fetched.wait(), "answers to be fetched")
        finally:
            self._lent = False
            self._report()

    def _came(self, request_id: str) -> None:
        """A prompt was accepted, perhaps of an answer that was given up here."""
        self._expected.discard(request_id)
        if not self._expected:
            self._fetched.set()

    async def _within(self, timeout_s: float, wait: Coroutine[Any, Any, object], what: str) -> None:
        """Waits for something that is not worth failing for."""
        try:
            async with asyncio.timeout(timeout_s):
                await wait
        except TimeoutError:
            self._log.warning("turns_on_without", what=what, waited_s=timeout_s)

    def _report(self) -> None:
        if self._registration is not None:
            self._registration.report_now()
