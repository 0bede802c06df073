"""No placement is left behind, whenever its request goes away."""

import asyncio

import pytest

from core.errors import DeadlineExceeded, Overloaded, Unavailable
from core.fence import Fence
from core.leader_finder import LeaderFinder
from core.messages import (
    Endpoint,
    Enqueue,
    Failure,
    Placement,
    PoolSizes,
    Prefilled,
    Rejection,
    Settle,
    TransferId,
    Welcome,
    Withdraw,
    WorkerRef,
)
from gateway.scheduler_link import SchedulerLink

ME = WorkerRef(name="gateway", incarnation="1")


@pytest.fixture
def link(monkeypatch):
    made = SchedulerLink(LeaderFinder(["unix:nowhere"], Fence()), ME)
    made._received(Welcome(scheduler="scheduler/1"))
    made.said = []
    monkeypatch.setattr(made._link, "send", lambda message: made.said.append(message) or True)
    return made


def transfer(number=1):
    return TransferId(request_id=f"r{number}", attempt=1)


def enqueue(remaining_s=10.0):
    return Enqueue(
        transfer=transfer(),
        model="m",
        prompt_tokens=3,
        max_new_tokens=4,
        remaining_s=remaining_s,
    )


def placement(*, local=False):
    def at(name):
        return Endpoint(worker=WorkerRef(name=name, incarnation="1"), address=f"unix:{name}")

    prefill = None if local else at("p")
    return Placement(transfer=transfer(), prefill=prefill, decode=at("d"), queue_s=0.0)


def of(link, kind):
    return [message for message in link.said if isinstance(message, kind)]


async def test_a_placement_is_held_until_it_is_settled(link):
    asking = asyncio.create_task(link.place(enqueue()))
    await asyncio.sleep(0)
    link._received(placement())
    assert await asking == placement()
    assert link._hello()[0].holdings[0].transfer == transfer()
    link.settle(transfer())
    link.settle(transfer())
    assert len(of(link, Settle)) == 1
    assert not link._hello()[0].holdings


async def test_a_prompt_that_the_decode_worker_reads_is_held_as_its_until_the_first_token(link):
    asking = asyncio.create_task(link.place(enqueue()))
    await asyncio.sleep(0)
    link._received(placement(local=True))
    await asking
    (held,) = link._hello()[0].holdings
    assert held.prefill == held.decode == WorkerRef(name="d", incarnation="1")
    link.prefilled(transfer())
    assert of(link, Prefilled)
    assert link._hello()[0].holdings[0].prefill is None


async def test_a_client_that_leaves_as_the_placement_comes_leaves_nothing(link):
    asking = asyncio.create_task(link.place(enqueue()))
    await asyncio.sleep(0)
    link._received(placement())
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert of(link, Withdraw)
    assert not link._hello()[0].holdings


async def test_a_placement_that_comes_too_late_is_settled_at_once(link):
    with pytest.raises(DeadlineExceeded):
        await link.place(enqueue(remaining_s=0.01))
    assert of(link, Withdraw)
    link._received(placement())
    assert of(link, Settle)


async def test_a_rejection_says_when_to_come_back(link):
    asking = asyncio.create_task(link.place(enqueue()))
    await asyncio.sleep(0)
    failure = Failure(code="overloaded", message="full")
    link._received(Rejection(transfer=transfer(), failure=failure, retry_after_s=7.0))
    with pytest.raises(Overloaded) as caught:
        await asking
    assert caught.value.retry_after_s == 7.0


async def test_what_waits_is_asked_again_on_a_new_stream_with_the_time_that_is_left(link):
    asking = asyncio.create_task(link.place(enqueue(remaining_s=10.0)))
    await asyncio.sleep(0)
    _, again = link._hello()
    assert again.transfer == transfer()
    assert 0 < again.remaining_s <= 10.0
    link.give_up(Unavailable("stopping"))
    with pytest.raises(Unavailable):
        await asking


def test_who_asks_whether_requests_can_be_served_hears_of_each_change():
    heard = []
    finder = LeaderFinder(["unix:nowhere"], Fence())
    link = SchedulerLink(finder, ME, on_pools=lambda: heard.append(link.not_ready("m")))
    link._received(Welcome(scheduler="scheduler/1"))
    none = PoolSizes(prefill_workers=1, decode_workers=0, not_ready="no decode worker", model="m")
    link._received(none)
    link._received(PoolSizes(prefill_workers=1, decode_workers=1, model="m"))
    link._lost()
    assert heard == ["no decode worker", None, "the scheduler cannot be reached"]


def test_a_scheduler_that_was_replaced_is_not_obeyed(link):
    link._received(Welcome(scheduler="scheduler/2", leader_token=7))
    link._received(Welcome(scheduler="scheduler/1", leader_token=6))
    link._received(PoolSizes(prefill_workers=1, decode_workers=1, model="m"))
    assert not link.reachable
    assert link._hello()[0].leader_token == 7


def test_an_empty_pool_of_one_model_says_nothing_of_another(link):
    link._received(PoolSizes(prefill_workers=1, decode_workers=1, model="m"))
    link._received(PoolSizes(prefill_workers=0, decode_workers=0, not_ready="none", model="n"))
    assert (link.not_ready("m"), link.not_ready("n")) == (None, "none")
    assert link.not_ready("o") == "the scheduler does not know the model"


async def test_a_placement_is_said_again_with_its_model_after_a_restart_of_the_scheduler(link):
    asking = asyncio.create_task(link.place(enqueue()))
    await asyncio.sleep(0)
    link._received(placement())
    await asking
    (hello,) = link._hello()
    assert [holding.model for holding in hello.holdings] == [enqueue().model]
