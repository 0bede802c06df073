"""The scheduler's desk answers every request once and forgets nothing that still holds blocks."""

import asyncio
from dataclasses import replace

import pytest

from core.config import SchedulerConfig
from core.errors import Forbidden
from core.messages import (
    BlockCounts,
    CacheNews,
    Compatibility,
    Endpoint,
    Enqueue,
    GatewayHello,
    Holding,
    Placement,
    PoolSizes,
    Prefilled,
    Rejection,
    Settle,
    TransferId,
    Withdraw,
    WorkerHello,
    WorkerLoad,
    WorkerRef,
    WorkerRole,
)
from core.tickets import Claim, Right, Tickets
from scheduler.desk import SchedulerDesk

TICKETS = Tickets(bytes(32))

GATEWAY = WorkerRef(name="gateway", incarnation="1")
SAME = Compatibility(
    model="m", revision="1", dtype="d", block_size=16, block_bytes=8, layout="l", protocol=1
)


class Gateway:
    """Collects what the desk says to one gateway."""

    def __init__(self, desk, ref=GATEWAY, holdings=()):
        self.desk, self.name, self.said = desk, str(ref), []
        self.reply = self.hears  # one object for the life of the stream
        self.says(GatewayHello(gateway=ref, holdings=holdings))

    def says(self, message):
        self.desk.gateway_says(self.name, message, self.reply)

    def hears(self, message):
        self.said.append(message)
        return True

    def of(self, kind):
        return [message for message in self.said if isinstance(message, kind)]


def transfer(number):
    return TransferId(request_id=f"r{number}", attempt=1)


def enqueue(number, *, prompt=16, new=16, model="m", remaining_s=60.0, tenant=""):
    return Enqueue(
        transfer=transfer(number),
        model=model,
        prompt_tokens=prompt,
        max_new_tokens=new,
        remaining_s=remaining_s,
        tenant=tenant,
    )


def join(desk, name, role, *, blocks=4, incarnation="1", draining=False):
    ref = WorkerRef(name=name, incarnation=incarnation)
    hello = WorkerHello(
        endpoint=Endpoint(worker=ref, address=f"unix:{name}"),
        role=role,
        compatibility=SAME,
        num_blocks=blocks,
        max_seqs=8,
        max_step_tokens=512,
    )
    member = desk.worker_joined(hello)
    load = WorkerLoad(
        blocks=BlockCounts(free=blocks), num_running=0, num_waiting=0, draining=draining
    )
    desk.worker_says(member, load)
    return member


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
async def desk(clock):
    made = SchedulerDesk(SchedulerConfig(max_queued=3), "m", TICKETS, clock)
    task = asyncio.create_task(made.run())
    yield made
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def turns():
    """Lets everything that is ready happen."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_request_waits_for_both_pools(desk):
    gateway = Gateway(desk)
    gateway.says(enqueue(1))
    await turns()
    assert not gateway.of(Placement)
    join(desk, "p", WorkerRole.PREFILL)
    await turns()
    assert not gateway.of(Placement)
    join(desk, "d", WorkerRole.DECODE)
    await turns()
    (placement,) = gateway.of(Placement)
    assert placement.prefill.worker.name == "p"
    assert placement.decode.worker.name == "d"


async def test_blocks_come_back_when_a_request_settles(desk):
    gateway = Gateway(desk)
    join(desk, "p", WorkerRole.PREFILL)
    join(desk, "d", WorkerRole.DECODE)
    for number in (1, 2, 3):  # two blocks each; the pool has four
        gateway.says(enqueue(number))
    await turns()
    assert len(gateway.of(Placement)) == 2
    gateway.says(Prefilled(transfer=transfer(1)))
    await turns()
    assert len(gateway.of(Placement)) == 2
    gateway.says(Settle(transfer=transfer(1)))
    await turns()
    assert len(gateway.of(Placement)) == 3


async def test_a_full_queue_refuses_at_once_and_says_when_to_come_back(desk):
    gateway = Gateway(desk)
    for number in range(4):
        gateway.says(enqueue(number))
    (rejection,) = gateway.of(Rejection)
    assert rejection.transfer == transfer(3)
    assert rejection.failure.code == "overloaded"
    assert rejection.retry_after_s > 0


async def test_a_tenant_that_fills_the_queue_keeps_no_other_tenant_out(desk):
    gateway = Gateway(desk)
    for number in range(3):
        gateway.says(enqueue(number, tenant="flood"))
    gateway.says(enqueue(3, tenant="guest"))
    (displaced,) = gateway.of(Rejection)
    assert (displaced.transfer, displaced.failure.code) == (transfer(2), "overloaded")
    gateway.says(enqueue(4, tenant="flood"))
    assert [each.transfer for each in gateway.of(Rejection)] == [transfer(2), transfer(4)]
    join(desk, "p", WorkerRole.PREFILL)
    join(desk, "d", WorkerRole.DECODE, blocks=16)
    await turns()
    assert transfer(3) in {each.transfer for each in gateway.of(Placement)}


async def test_a_withdrawn_request_is_never_placed(desk):
    gateway = Gateway(desk)
    gateway.says(enqueue(1))
    gateway.says(Withdraw(transfer=transfer(1)))
    join(desk, "p", WorkerRole.PREFILL)
    join(desk, "d", WorkerRole.DECODE)
    await turns()
    assert not gateway.of(Placement)
    assert desk.num_queued == 0


async def test_a_withdrawal_that_crossed_the_placement_frees_it(desk):
    gateway = Gateway(desk)
    join(desk, "p", WorkerRole.PREFILL)
    join(desk, "d", WorkerRole.DECODE)
    gateway.says(enqueue(1))
    await turns()
    gateway.says(Withdraw(transfer=transfer(1)))
    assert not desk.cluster.held


async def test_the_requests_of_a_lost_gateway_leave_the_queue_and_the_pools(desk):
    gateway = Gateway(desk)
    other = Gateway(desk, WorkerRef(name="gateway", incarnation="2"))
    join(desk, "p", WorkerRole.PREFILL)
    join(desk, "d", WorkerRole.DECODE)
    for number in (1, 2, 3):
        gateway.says(enqueue(number))
    await turns()  # two are placed, one waits
    other.says(enqueue(4))
    await turns()
    desk.gateway_left(gateway.name, gateway.reply)
    await turns()
    assert [placement.transfer for placement in other.of(Placement)] == [transfer(4)]
    assert desk.num_queued == 0


async def test_what_a_gateway_still_holds_counts_after_a_restart(desk):
    holding = Holding(
        transfer=transfer(9),
        prefill=None,
        decode=WorkerRef(name="d", incarnation="1"),
        prompt_tokens=32,
        max_new_tokens=16,
    )
    gateway = Gateway(desk, holdings=(holding,))
    join(desk, "p", WorkerRole.PREFILL)
    join(desk, "d", WorkerRole.DECODE)
    gateway.says(enqueue(1))
    await turns()
    assert not gateway.of(Placement)  # three of four blocks are held, two are needed
    gateway.says(Settle(transfer=transfer(9)))
    await turns()
    assert gateway.of(Placement)


async def test_a_worker_whose_stream_ended_gets_nothing_and_gateways_hear_of_it(desk):
    gateway = Gateway(desk)
    join(desk, "p", WorkerRole.PREFILL)
    key = join(desk, "d", WorkerRole.DECODE)
    await turns()
    assert gateway.of(PoolSizes)[-1] == PoolSizes(prefill_workers=1, decode_workers=1, model="m")
    desk.worker_left(key)
    gateway.says(enqueue(1))
    await turns()
    assert gateway.of(PoolSizes)[-1].not_ready == "no decode worker is ready"
    assert not gateway.of(Placement)


async def test_a_placement_carries_a_ticket_for_this_pair_and_this_attempt(desk):
    gateway = Gateway(desk)
    join(desk, "p", WorkerRole.PREFILL)
    join(desk, "d", WorkerRole.DECODE)
    gateway.says(enqueue(1))
    await turns()
    (placement,) = gateway.of(Placement)
    claim = Claim(
        right=Right.HANDOFF,
        prefill=placement.prefill.worker,
        decode=placement.decode.worker,
        transfer=placement.transfer,
    )
    TICKETS.check(claim, placement.ticket)
    other = replace(claim, transfer=TransferId(request_id="r1", attempt=2))
    with pytest.raises(Forbidden):
        TICKETS.check(other, placement.ticket)


async def test_a_new_life_of_a_worker_replaces_the_old_one(desk):
    join(desk, "p", WorkerRole.PREFILL, incarnation="1")
    member = join(desk, "p", WorkerRole.PREFILL, incarnation="2")
    assert list(desk.cluster.members.values()) == [member]


async def test_the_late_end_of_an_earlier_stream_changes_nothing(desk):
    gateway = Gateway(desk)
    earlier = join(desk, "p", WorkerRole.PREFILL)
    join(desk, "p", WorkerRole.PREFILL)
    join(desk, "d", WorkerRole.DECODE)
    desk.worker_left(earlier)
    again = Gateway(desk)
    again.says(enqueue(1))
    desk.gateway_left(gateway.name, gateway.reply)
    await turns()
    assert again.of(Placement)


async def test_a_pool_that_stays_empty_refuses_what_waits(desk, clock):
    gateway = Gateway(desk)
    gateway.says(enqueue(1))
    await turns()
    assert not gateway.of(Rejection)
    clock.now_s = 31.0
    gateway.says(enqueue(2))
    await turns()
    assert {rejection.failure.code for rejection in gateway.of(Rejection)} == {"unavailable"}
    assert desk.num_queued == 0


async def test_a_draining_worker_gets_nothing(desk):
    gateway = Gateway(desk)
    join(desk, "p", WorkerRole.PREFILL)
    join(desk, "d", WorkerRole.DECODE, draining=True)
    gateway.says(enqueue(1))
    await turns()
    assert not gateway.of(Placement)


def joins(desk, name, *, load, local_prefill=True):
    """A decode worker that reads prompts itself, and its report."""
    ref = WorkerRef(name=name, incarnation="1")
    hello = WorkerHello(
        endpoint=Endpoint(worker=ref, address=f"unix:{name}"),
        role=WorkerRole.DECODE,
        compatibility=SAME,
        num_blocks=load.blocks.total,
        max_seqs=8,
        max_step_tokens=16,
        local_prefill=local_prefill,
    )
    member = desk.worker_joined(hello)
    desk.worker_says(member, load)
    return member


def report(free, *, cached=0, owned=0, preempted=0):
    blocks = BlockCounts(free=free, cached=cached, owned=owned)
    return WorkerLoad(blocks=blocks, num_running=0, num_waiting=0, num_preempted=preempted)


async def test_a_decode_worker_alone_makes_a_cluster_and_its_ticket_names_no_prefill_worker(desk):
    gateway = Gateway(desk)
    joins(desk, "d", load=report(8))
    gateway.says(enqueue(1))
    await turns()
    assert gateway.of(PoolSizes)[-1] == PoolSizes(prefill_workers=0, decode_workers=1, model="m")
    (placement,) = gateway.of(Placement)
    assert placement.prefill is None
    claim = Claim(
        right=Right.HANDOFF,
        prefill=None,
        decode=placement.decode.worker,
        transfer=placement.transfer,
    )
    TICKETS.check(claim, placement.ticket)
    assert desk.num_placements == {"disaggregated": 0, "local": 1}


async def test_prompts_that_a_decode_worker_reads_count_until_they_are_read(desk):
    gateway = Gateway(desk)
    joins(desk, "d", load=report(8))
    for number in (1, 2, 3):  # two steps of 16 tokens are what it takes
        gateway.says(enqueue(number))
    await turns()
    assert len(gateway.of(Placement)) == 2
    gateway.says(Prefilled(transfer=transfer(1)))
    await turns()
    assert len(gateway.of(Placement)) == 3


async def test_prompts_that_a_decode_worker_reads_count_after_a_restart(desk):
    d = WorkerRef(name="d", incarnation="1")
    reading = [
        Holding(transfer=transfer(n), prefill=d, decode=d, prompt_tokens=16, max_new_tokens=16)
        for n in (8, 9)
    ]
    gateway = Gateway(desk, holdings=tuple(reading))
    joins(desk, "d", load=report(8))
    gateway.says(enqueue(1))
    await turns()
    assert not gateway.of(Placement)
    gateway.says(Prefilled(transfer=transfer(8)))
    await turns()
    assert gateway.of(Placement)


async def test_the_loss_of_the_last_prefill_worker_leaves_the_decode_workers_to_read(desk):
    gateway = Gateway(desk)
    p = join(desk, "p", WorkerRole.PREFILL)
    joins(desk, "d", load=report(8))
    gateway.says(enqueue(1))
    await turns()
    desk.worker_left(p)
    gateway.says(enqueue(2))
    await turns()
    assert [placement.prefill is None for placement in gateway.of(Placement)] == [False, True]
    assert gateway.of(PoolSizes)[-1].not_ready == ""


async def test_answers_that_outgrew_what_was_reserved_take_the_room_that_is_reported(desk):
    gateway = Gateway(desk)
    join(desk, "p", WorkerRole.PREFILL)
    d = joins(desk, "d", load=report(16), local_prefill=False)
    gateway.says(enqueue(1))
    await turns()
    desk.worker_says(d, report(1, owned=15))
    gateway.says(enqueue(2))
    await turns()
    assert len(gateway.of(Placement)) == 1
    desk.worker_says(d, report(0, cached=2, owned=14))  # what is only cached gives way
    await turns()
    assert len(gateway.of(Placement)) == 2


async def test_placements_since_the_last_report_are_taken_off_it(desk):
    gateway = Gateway(desk)
    join(desk, "p", WorkerRole.PREFILL)
    d = joins(desk, "d", load=report(16), local_prefill=False)
    desk.worker_says(d, report(5, owned=11))
    for number in (1, 2, 3):  # two blocks each
        gateway.says(enqueue(number))
    await turns()
    assert len(gateway.of(Placement)) == 2


async def test_a_worker_with_preempted_sequences_is_given_nothing_until_they_run_again(desk):
    gateway = Gateway(desk)
    d = joins(desk, "d", load=report(8, preempted=1))
    gateway.says(enqueue(1))
    await turns()
    assert not gateway.of(Placement)
    desk.worker_says(d, report(8))
    await turns()
    assert gateway.of(Placement)


async def test_who_lost_a_placement_goes_before_those_that_had_none(desk):
    gateway = Gateway(desk)
    gateway.says(enqueue(1))
    again = TransferId(request_id="r2", attempt=2)
    gateway.says(replace(enqueue(2), transfer=again))
    joins(desk, "d", load=report(3))  # room for one
    await turns()
    assert [placement.transfer for placement in gateway.of(Placement)] == [again]


# --- the policy's wishes, carried out ------------------------------------------------------------


async def test_a_placement_says_why_it_was_made_to_whoever_asks(desk):
    gateway = Gateway(desk)
    join(desk, "p", WorkerRole.PREFILL)
    join(desk, "d", WorkerRole.DECODE)
    gateway.says(replace(enqueue(1), explain=True))
    gateway.says(enqueue(2))
    await turns()
    asked, not_asked = sorted(gateway.of(Placement), key=lambda each: str(each.transfer))
    assert asked.explanation.candidates[0].prefill == "p/1"
    assert not_asked.explanation is None


async def test_the_lower_priority_value_is_placed_first(desk):
    gateway = Gateway(desk)
    gateway.says(enqueue(1))
    gateway.says(replace(enqueue(2), priority=-1))
    joins(desk, "d", load=report(3))  # room for one
    await turns()
    assert [placement.transfer for placement in gateway.of(Placement)] == [transfer(2)]


async def test_a_tenant_that_floods_does_not_keep_another_waiting(desk):
    gateway = Gateway(desk)
    for number in (1, 2):
        gateway.says(replace(enqueue(number), tenant="flood"))
    gateway.says(replace(enqueue(3), tenant="guest"))
    joins(desk, "d", load=report(5))  # room for two
    await turns()
    placed = {placement.transfer for placement in gateway.of(Placement)}
    assert placed == {transfer(1), transfer(3)}


async def test_what_a_worker_caches_brings_it_the_prompts_that_begin_so(desk):
    gateway = Gateway(desk)
    for name in ("p", "q"):
        member = join(desk, name, WorkerRole.PREFILL, blocks=64)
        if name == "q":
            desk.worker_cached(member, CacheNews(whole=True, published=(1, 2, 3)))
    join(desk, "d", WorkerRole.DECODE, blocks=64)
    gateway.says(replace(enqueue(1, prompt=64), block_hashes=(1, 2, 3)))
    await turns()
    assert gateway.of(Placement)[0].prefill.worker.name == "q"


async def test_a_deadline_that_the_queue_alone_costs_is_refused_before_it_is_queued(clock):
    desk = SchedulerDesk(SchedulerConfig(), "m", TICKETS, clock)
    gateway = Gateway(desk)
    joins(desk, "d", load=replace(report(4), prefill_tokens_per_s=1000.0, step_s=0.1))
    for number in range(10):
        gateway.says(enqueue(number))
    desk.decide_now()
    for number in range(6):  # two at a time, one of which ends every half second
        gateway.says(Prefilled(transfer=transfer(number)))
        clock.now_s += 0.5
        gateway.says(Settle(transfer=transfer(number)))
        desk.decide_now()
    assert desk.num_queued == 2
    gateway.says(enqueue(30, remaining_s=3.0))
    assert not gateway.of(Rejection)
    gateway.says(enqueue(31, remaining_s=1.7))  # a second in the queue, and as long to answer
    (late,) = gateway.of(Rejection)
    assert (late.transfer, late.failure.code) == (transfer(31), "overloaded")
    assert late.retry_after_s >= 1.0
    assert desk.num_rejections == {"overloaded": 1}
