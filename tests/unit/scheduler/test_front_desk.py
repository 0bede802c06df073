"""Two models share a scheduler and nothing else: neither workers nor a queue."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from core.config import SchedulerConfig
from core.errors import ModelNotFound
from core.messages import (
    BlockCounts,
    Compatibility,
    Endpoint,
    Enqueue,
    GatewayHello,
    Holding,
    Placement,
    PoolSizes,
    Rejection,
    Settle,
    TransferId,
    Withdraw,
    WorkerHello,
    WorkerLoad,
    WorkerRef,
    WorkerRole,
)
from core.tickets import Tickets
from scheduler.desk import SchedulerDesk
from scheduler.front_desk import FrontDesk

TICKETS = Tickets(bytes(32))
GATEWAY = WorkerRef(name="gateway", incarnation="1")
D = WorkerRef(name="d", incarnation="1")


class Gateway:
    """Collects what the scheduler says to one gateway."""

    def __init__(self, front, holdings=()):
        self._front, self.said = front, []
        self.reply = self.hears  # one object for the life of the stream
        self.says(GatewayHello(gateway=GATEWAY, holdings=holdings, admin_address="here:1"))

    def says(self, message):
        self._front.gateway_says(str(GATEWAY), message, self.reply)

    def hears(self, message):
        self.said.append(message)
        return True

    def of(self, kind):
        return [message for message in self.said if isinstance(message, kind)]


def transfer(number):
    return TransferId(request_id=f"r{number}", attempt=1)


def enqueue(number, model):
    return Enqueue(
        transfer=transfer(number),
        model=model,
        prompt_tokens=16,
        max_new_tokens=16,
        remaining_s=60.0,
    )


def hello(name, model):
    """A decode worker that reads its prompts itself. All of them have equal KV blocks."""
    return WorkerHello(
        endpoint=Endpoint(worker=WorkerRef(name=name, incarnation="1"), address=f"unix:{name}"),
        role=WorkerRole.DECODE,
        compatibility=Compatibility(
            model="c", revision="1", dtype="d", block_size=16, block_bytes=8, layout="l", protocol=1
        ),
        num_blocks=64,
        max_seqs=8,
        max_step_tokens=512,
        local_prefill=True,
        model=model,
    )


def joins(front, name, model):
    desk, member = front.worker_joined(hello(name, model))
    load = WorkerLoad(
        blocks=BlockCounts(free=64),
        num_running=0,
        num_waiting=0,
        prefill_tokens_per_s=10_000.0,
        step_s=0.01,
    )
    desk.worker_says(member, load)
    return desk, member


@asynccontextmanager
async def running(**limits):
    """The front desk of two models, "a" and "b"; `limits` are those of "a"."""
    front = FrontDesk(
        [
            SchedulerDesk(SchedulerConfig(**limits), "a", TICKETS),
            SchedulerDesk(SchedulerConfig(), "b", TICKETS),
        ]
    )
    async with AsyncExitStack() as held:
        task = asyncio.create_task(front.run())
        held.callback(task.cancel)
        yield front


@pytest.fixture
async def front():
    async with running() as made:
        yield made


async def turns():
    for _ in range(10):
        await asyncio.sleep(0)


async def test_requests_go_to_the_workers_of_their_model_alone(front):
    gateway = Gateway(front)
    joins(front, "d-a", "a")
    joins(front, "d-b", "b")
    for number in range(6):
        gateway.says(enqueue(number, "ab"[number % 2]))
    await turns()
    placed = {p.transfer: p.decode.worker.name for p in gateway.of(Placement)}
    assert placed == {transfer(n): ("d-a", "d-b")[n % 2] for n in range(6)}


async def test_workers_of_another_model_help_nobody_out(front):
    gateway = Gateway(front)
    joins(front, "d-b", "b")
    gateway.says(enqueue(1, "a"))
    await turns()
    assert not gateway.of(Placement)
    assert front.not_ready() == {"a": "no worker is ready", "b": None}
    assert front.unable() is None
    joins(front, "d-a", "a")
    await turns()
    assert gateway.of(Placement)


async def test_a_full_queue_of_one_model_does_not_touch_the_other():
    async with running(max_queued=2) as front:
        gateway = Gateway(front)
        for number in range(5):
            gateway.says(enqueue(number, "a"))
        assert [r.failure.code for r in gateway.of(Rejection)] == ["overloaded"] * 3
        for number in range(10, 15):
            gateway.says(enqueue(number, "b"))
        assert len(gateway.of(Rejection)) == 3
        joins(front, "d-b", "b")
        await turns()
        assert len(gateway.of(Placement)) == 5


async def test_no_more_run_at_once_than_a_model_may_have():
    async with running(max_running=2) as front:
        gateway = Gateway(front)
        joins(front, "d-a", "a")
        joins(front, "d-b", "b")
        for number in range(4):
            gateway.says(enqueue(number, "a"))
            gateway.says(enqueue(10 + number, "b"))
        await turns()
        names = [p.decode.worker.name for p in gateway.of(Placement)]
        assert (names.count("d-a"), names.count("d-b")) == (2, 4)
        gateway.says(Settle(transfer=transfer(0)))
        await turns()
        assert [p.transfer for p in gateway.of(Placement)][-1] == transfer(2)
        assert front.desks["a"].num_queued == 1


async def test_each_model_has_its_pool_told(front):
    gateway = Gateway(front)
    joins(front, "d-b", "b")
    await turns()
    latest = {sizes.model: sizes for sizes in gateway.of(PoolSizes)}
    assert latest["a"].not_ready == "no worker is ready"
    assert latest["b"] == PoolSizes(prefill_workers=0, decode_workers=1, model="b")


async def test_a_model_that_nobody_knows_is_refused_with_those_that_are_known(front):
    gateway = Gateway(front)
    gateway.says(enqueue(1, "c"))
    (rejection,) = gateway.of(Rejection)
    assert rejection.failure.code == "model_not_found"
    assert rejection.failure.message.endswith("'c'; it knows: a, b")
    assert front.num_rejections == {"model_not_found": 1}


def test_a_worker_of_a_model_that_nobody_knows_is_refused_by_name():
    front = FrontDesk([SchedulerDesk(SchedulerConfig(), "a", TICKETS)])
    with pytest.raises(ModelNotFound, match="'b'; it knows: a"):
        front.worker_joined(hello("d", "b"))
    assert not front.members


async def test_what_was_placed_before_a_restart_counts_for_its_own_model(front):
    held = [
        Holding(
            transfer=transfer(n),
            prefill=None,
            decode=D,
            prompt_tokens=16,
            max_new_tokens=16,
            model=model,
        )
        for n, model in enumerate(("a", "b", "b", "gone"))
    ]
    gateway = Gateway(front, tuple(held))
    assert [len(desk.cluster.held) for desk in front.desks.values()] == [1, 2]
    gateway.says(Settle(transfer=transfer(1)))
    assert [len(desk.cluster.held) for desk in front.desks.values()] == [1, 1]


async def test_who_leaves_leaves_every_model(front):
    gateway = Gateway(front)
    for number, model in enumerate("abb"):
        gateway.says(enqueue(number, model))
    gateway.says(Withdraw(transfer=transfer(1)))
    assert [desk.num_queued for desk in front.desks.values()] == [1, 1]
    assert front.gateway_admins == {str(GATEWAY): "here:1"}
    front.gateway_left(str(GATEWAY), gateway.reply)
    assert [desk.num_queued for desk in front.desks.values()] == [0, 0]
    assert not front.gateway_admins
