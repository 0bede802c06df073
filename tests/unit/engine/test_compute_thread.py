"""One thread computes; results and exceptions come back to whoever waits."""

import asyncio
import threading

import pytest
import torch

from core.errors import Unavailable
from engine.compute_thread import ComputeThread

DEADLINE_S = 10.0


async def test_everything_runs_on_one_other_thread_in_order() -> None:
    compute = ComputeThread(threads=1)
    order: list[int] = []
    futures = [compute.submit(order.append, number) for number in range(20)]
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*futures)
        threads = {await compute.run(threading.get_ident) for _ in range(3)}
    assert order == list(range(20))
    assert len(threads) == 1
    assert threads != {threading.get_ident()}
    assert await compute.close()


async def test_the_thread_computes_with_the_cores_it_was_given() -> None:
    compute = ComputeThread(threads=1)
    assert await compute.run(torch.get_num_threads) == 1
    assert await compute.close()


@pytest.mark.parametrize("kind", [ValueError, StopIteration, SystemExit])
async def test_an_exception_reaches_the_waiter_and_the_thread_goes_on(
    kind: type[BaseException],
) -> None:
    def fail() -> None:
        raise kind("broken")

    compute = ComputeThread(threads=1)
    with pytest.raises(RuntimeError if kind is StopIteration else kind):
        await compute.run(fail)
    assert await compute.run(lambda: 5) == 5
    assert await compute.close()


async def test_a_cancelled_waiter_does_not_stop_the_work_behind_it() -> None:
    compute = ComputeThread(threads=1)
    gate = threading.Event()
    future = compute.submit(gate.wait, DEADLINE_S)
    future.cancel()
    after = compute.submit(lambda: "next")
    gate.set()
    async with asyncio.timeout(DEADLINE_S):
        assert await after == "next"
    assert await compute.close()


async def test_close_has_a_deadline_and_says_whether_it_was_kept() -> None:
    compute = ComputeThread(threads=1)
    gate = threading.Event()
    future = compute.submit(gate.wait, DEADLINE_S)
    assert not await compute.close(timeout_s=0.05)
    with pytest.raises(Unavailable):
        compute.submit(lambda: None)
    gate.set()
    assert await compute.close(timeout_s=DEADLINE_S)
    assert await future
