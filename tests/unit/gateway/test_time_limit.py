"""One timer for many waits bounds each of them, and swallows nobody else's cancellation."""

import asyncio

import pytest

from gateway.time_limit import TimeLimit

NEVER_S = 3600.0


@pytest.fixture
async def limit():
    made = TimeLimit()
    yield made
    made.close()


async def test_a_wait_that_takes_too_long_is_a_timeout(limit):
    with pytest.raises(TimeoutError), limit.within(0.01):
        await asyncio.Event().wait()
    assert asyncio.current_task().cancelling() == 0


async def test_each_wait_has_its_own_limit(limit):
    with limit.within(NEVER_S):
        await asyncio.sleep(0)
    with pytest.raises(TimeoutError), limit.within(0.01):  # earlier than the timer that is set
        await asyncio.Event().wait()
    with limit.within(0.01):
        await asyncio.sleep(0)
    with limit.within(0.2):  # later than the timer that is set
        await asyncio.sleep(0.05)


async def test_time_between_waits_does_not_count(limit):
    with limit.within(0.01):
        await asyncio.sleep(0)
    await asyncio.sleep(0.05)
    with limit.within(NEVER_S):
        await asyncio.sleep(0)


async def test_a_moment_that_has_passed_ends_the_first_wait(limit):
    with pytest.raises(TimeoutError), limit.until(0.0):
        await asyncio.Event().wait()


async def test_a_wait_can_be_ended_from_outside(limit):
    limit.expire()  # nobody waits
    asyncio.get_running_loop().call_soon(limit.expire)
    with pytest.raises(TimeoutError), limit.within(NEVER_S):
        await asyncio.Event().wait()
    asyncio.get_running_loop().call_soon(limit.expire)
    with pytest.raises(TimeoutError), limit.until(float("inf")):
        await asyncio.Event().wait()


async def test_a_cancellation_is_no_timeout(limit):
    waits = asyncio.Event()

    async def wait():
        with limit.within(NEVER_S):
            waits.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await waits.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancellation_at_the_same_moment_wins(limit):
    waits = asyncio.Event()

    async def wait():
        with limit.within(NEVER_S):
            waits.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await waits.wait()
    limit.expire()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_other_errors_pass(limit):
    with pytest.raises(KeyError), limit.within(NEVER_S):
        raise KeyError


async def test_many_waits_set_one_timer(limit, monkeypatch):
    loop = asyncio.get_running_loop()
    set_timers = []
    original = loop.call_at
    monkeypatch.setattr(
        loop, "call_at", lambda *args, **kw: set_timers.append(args) or original(*args, **kw)
    )
    for _ in range(1000):
        with limit.within(NEVER_S):
            await asyncio.sleep(0)
    assert len(set_timers) == 1
