"""A worker that leaves hands what it decodes to its peers, where it has any."""

import pytest

from core.config import SchedulerConfig
from core.messages import (
    BlockCounts,
    Compatibility,
    Endpoint,
    HandOver,
    WorkerHello,
    WorkerLoad,
    WorkerRef,
    WorkerRole,
)
from core.tickets import Tickets
from scheduler.desk import SchedulerDesk

SAME = Compatibility(
    model="m", revision="1", dtype="d", block_size=16, block_bytes=8, layout="l", protocol=1
)


@pytest.fixture
def desk():
    return SchedulerDesk(SchedulerConfig(), "m", Tickets(bytes(32)), lambda: 0.0)


def load(**fields):
    return WorkerLoad(blocks=BlockCounts(free=8), num_running=0, num_waiting=0, **fields)


def join(desk, name, role=WorkerRole.DECODE):
    """A member, and what it is told."""
    hello = WorkerHello(
        endpoint=Endpoint(worker=WorkerRef(name=name, incarnation="1"), address=f"unix:{name}"),
        role=role,
        compatibility=SAME,
        num_blocks=8,
        max_seqs=8,
        max_step_tokens=512,
    )
    member, told = desk.worker_joined(hello), []
    member.tell = told.append
    desk.worker_says(member, load())
    return member, told


def test_it_is_told_once_to_hand_over(desk):
    leaving, told = join(desk, "decode-0")
    join(desk, "decode-1")
    desk.worker_says(leaving, load(draining=True))
    desk.worker_says(leaving, load(draining=True))
    assert told == [HandOver()]


def test_the_last_one_finishes_what_it_has(desk):
    leaving, told = join(desk, "decode-0")
    join(desk, "prefill-0", WorkerRole.PREFILL)
    desk.worker_says(leaving, load(draining=True))
    assert told == []


def test_it_hands_over_as_soon_as_a_peer_has_come(desk):
    leaving, told = join(desk, "decode-0")
    desk.worker_says(leaving, load(draining=True))
    join(desk, "decode-1")
    desk.worker_says(leaving, load(draining=True))
    assert told == [HandOver()]


def test_peers_that_leave_as_well_take_nothing(desk):
    leaving, told = join(desk, "decode-0")
    other, _ = join(desk, "decode-1")
    desk.worker_says(other, load(draining=True))
    desk.worker_says(leaving, load(draining=True))
    assert told == []


def test_a_prefill_worker_finishes_its_prompts(desk):
    leaving, told = join(desk, "prefill-0", WorkerRole.PREFILL)
    join(desk, "decode-0")
    desk.worker_says(leaving, load(draining=True))
    assert told == []
