"""A worker of both roles: who hears what, and when, as it turns and leaves."""

import asyncio
import contextlib

import pytest

from core.messages import BlockCounts, Counter, WorkerLoad, WorkerRole
from deploy.elastic.desk import ElasticDesk

PREFILL, DECODE = WorkerRole.PREFILL, WorkerRole.DECODE


class Half:
    """A decode or prefill desk. What it holds goes when the test says so."""

    def __init__(self, name, happened, **counts):
        self.name, self.counts = name, counts
        self.draining = False
        self.held = set()
        self.stalled_s = 0.0
        self.on_accepted = None
        self._happened = happened
        self._idle = asyncio.Event()
        self._idle.set()

    def hold(self, *requests):
        self.held |= set(requests)
        self._idle.clear()

    def let_go(self):
        self.held.clear()
        self._idle.set()

    async def run(self):
        await asyncio.Event().wait()

    async def idle(self):
        await self._idle.wait()

    async def drained(self):
        self.draining = True
        await self.idle()

    def hand_over(self):
        self.draining = True
        self._happened.append(f"{self.name} gives up {sorted(self.held)}")
        return tuple(self.held)

    def take_work(self):
        self.draining = False

    def report_when_it_matters(self, report_now):
        pass

    def not_ready(self):
        return f"{self.name} drains" if self.draining else None

    def leases(self):
        return {"owned": len(self.held)}

    def load(self):
        counters = tuple(Counter(name=name, value=n) for name, n in self.counts.items())
        return WorkerLoad(
            blocks=BlockCounts(free=8),
            num_running=len(self.held),
            num_waiting=0,
            draining=self.draining,
            step_s=1.0 if self.name == "decode" else 2.0,
            counters=counters,
        )


class Registration:
    """Heard by the scheduler when the test says so."""

    def __init__(self, happened):
        self.known = asyncio.Event()
        self._happened = happened
        self.num_reports = 0

    def become(self, role, *, local_prefill):
        self.known.clear()
        self._happened.append(f"says {role.name.lower()}, reads prompts: {local_prefill}")

    def report_now(self):
        self.num_reports += 1


class Worker:
    def __init__(self, role):
        self.happened = []
        self.decode = Half("decode", self.happened, blocks_evicted=3, handed_over=1)
        self.prefill = Half("prefill", self.happened, blocks_evicted=3, prefix_cache_hits=5)
        self.registration = Registration(self.happened)
        self.desk = ElasticDesk(
            self.decode, self.prefill, role, reads_prompts=True, turn_timeout_s=60.0
        )
        self.desk.registered(self.registration)

    async def settle(self):
        for _ in range(10):
            await asyncio.sleep(0)


@pytest.fixture
async def make_worker():
    async with contextlib.AsyncExitStack() as stack:

        async def make(role):
            worker = Worker(role)
            task = asyncio.create_task(worker.desk.run())

            async def end():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

            stack.push_async_callback(end)
            await worker.settle()
            return worker

        yield make


async def test_it_gives_its_answers_up_once_the_scheduler_knows_who_may_read_them(make_worker):
    worker = await make_worker(DECODE)
    worker.decode.hold("a", "b")
    worker.desk.turn(PREFILL)
    await worker.settle()
    assert worker.happened == ["says prefill, reads prompts: False"]
    assert worker.decode.draining, "new ones go elsewhere already"
    assert worker.desk.load().turning
    worker.registration.known.set()
    await worker.settle()
    assert worker.happened[1:] == ["decode gives up ['a', 'b']"]
    assert worker.desk.load().turning
    reports = worker.registration.num_reports
    worker.decode.let_go()
    await worker.settle()
    assert not worker.desk.load().turning
    assert worker.registration.num_reports > reports, "the scheduler hears at once"
    assert worker.desk.role is PREFILL


async def test_it_takes_answers_at_once_and_reads_the_prompts_that_it_has(make_worker):
    worker = await make_worker(PREFILL)
    assert worker.decode.draining, "nobody decodes on a prefill worker"
    worker.prefill.hold("a")
    worker.desk.turn(DECODE)
    worker.registration.known.set()
    await worker.settle()
    worker.registration.known.set()
    await worker.settle()
    assert worker.happened == ["says decode, reads prompts: True"]
    assert not worker.decode.draining and not worker.prefill.draining
    assert worker.desk.load().turning, "a prompt is left"
    worker.prefill.let_go()
    await worker.settle()
    assert not worker.desk.load().turning


async def test_a_turn_that_is_taken_back_ends_as_it_was(make_worker):
    worker = await make_worker(DECODE)
    worker.decode.hold("a")
    worker.desk.turn(PREFILL)
    worker.desk.turn(DECODE)
    for _ in range(2):
        await worker.settle()
        worker.registration.known.set()
    worker.decode.let_go()
    await worker.settle()
    assert worker.desk.role is DECODE
    assert not worker.decode.draining
    assert not worker.desk.load().turning


async def test_a_turn_to_the_role_that_it_serves_is_none(make_worker):
    worker = await make_worker(DECODE)
    worker.desk.turn(DECODE)
    await worker.settle()
    assert worker.happened == []
    assert not worker.desk.load().turning


async def test_who_leaves_lends_itself_until_its_answers_have_been_fetched(make_worker):
    worker = await make_worker(DECODE)
    worker.decode.hold("a", "b")
    leaving = asyncio.create_task(worker.desk.drained())
    await worker.settle()
    assert worker.desk.load().draining, "the scheduler looks for peers"
    worker.desk.hand_over()
    await worker.settle()
    worker.registration.known.set()
    await worker.settle()
    assert worker.happened[-1] == "decode gives up ['a', 'b']"
    worker.decode.let_go()
    worker.prefill.on_accepted("a")
    await worker.settle()
    load = worker.desk.load()
    assert (load.draining, load.turning) == (False, True), "b may be read here still"
    worker.prefill.on_accepted("b")
    worker.prefill.hold("b")
    await worker.settle()
    assert worker.desk.load().draining
    assert not leaving.done()
    worker.prefill.let_go()
    await worker.settle()
    assert leaving.done()


async def test_who_leaves_without_peers_finishes_what_it_has(make_worker):
    worker = await make_worker(DECODE)
    worker.decode.hold("a")
    leaving = asyncio.create_task(worker.desk.drained())
    await worker.settle()
    assert worker.happened == []
    worker.decode.let_go()
    await worker.settle()
    assert leaving.done()


async def test_what_is_told_is_of_both_desks_and_counts_the_pool_once(make_worker):
    worker = await make_worker(PREFILL)
    worker.decode.hold("a")
    worker.prefill.hold("b", "c")
    load = worker.desk.load()
    assert load.num_running == 3
    assert load.step_s == 2.0, "its own role's"
    assert {each.name: each.value for each in load.counters} == {
        "blocks_evicted": 3,
        "handed_over": 1,
        "prefix_cache_hits": 5,
    }
    assert worker.desk.leases() == {"owned": 3}
    assert worker.desk.not_ready() is None
