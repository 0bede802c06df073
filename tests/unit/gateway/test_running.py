"""Requests are found by their ids, by their own tenant alone, and end at once when cancelled."""

import asyncio

import pytest

from core.errors import Cancelled, DeadlineExceeded, RequestNotFound
from core.messages import StopReason
from gateway.running import RunningRequest, RunningRequests


class Stream:
    def __init__(self):
        self.reasons = []

    def stop(self, reason, choice=None):
        self.reasons.append(reason)


@pytest.mark.parametrize("name", ["job", "label"])
def test_a_request_is_found_by_its_own_id_and_by_the_clients(name):
    running, request = RunningRequests(), RunningRequest("job")
    with running.entered(request, tenant="acme", label="label"):
        running.cancel(name, tenant="acme")
    assert request.cancelled


@pytest.mark.parametrize(("name", "tenant"), [("job", "other"), ("label", ""), ("x", "acme")])
def test_a_request_of_another_tenant_or_id_is_not_found(name, tenant):
    running, request = RunningRequests(), RunningRequest("job")
    with (
        running.entered(request, tenant="acme", label="label"),
        pytest.raises(RequestNotFound),
    ):
        running.cancel(name, tenant=tenant)
    assert not request.cancelled


def test_a_request_that_has_ended_is_not_found_and_leaves_nothing():
    running = RunningRequests()
    with running.entered(RunningRequest("job"), tenant="", label="label"):
        assert len(list(running)) == 1
    with pytest.raises(RequestNotFound):
        running.cancel("label", tenant="")
    assert list(running) == []


def test_one_label_of_several_requests_means_all_of_them():
    running = RunningRequests()
    first, second, other = (RunningRequest(name) for name in "abc")
    with (
        running.entered(first, tenant="", label="x"),
        running.entered(second, tenant="", label="x"),
        running.entered(other, tenant="", label="y"),
    ):
        running.cancel("x", tenant="")
    assert (first.cancelled, second.cancelled, other.cancelled) == (True, True, False)


async def test_cancelling_stops_the_job_and_wakes_who_waits_for_it():
    request, stream = RunningRequest("job"), Stream()
    request.begin(stream)
    waiting = asyncio.create_task(request.wait(asyncio.Event().wait()))
    await asyncio.sleep(0)
    request.cancel()
    request.cancel()
    with pytest.raises(Cancelled):
        await asyncio.wait_for(waiting, 5)
    assert set(stream.reasons) == {StopReason.CANCELLED}


async def test_a_request_that_is_cancelled_between_two_waits_waits_no_more():
    request = RunningRequest("job")
    request.cancel()
    with pytest.raises(Cancelled):
        await asyncio.wait_for(request.wait(asyncio.Event().wait()), 5)


async def test_a_wait_has_its_own_deadline():
    request = RunningRequest("job")
    with pytest.raises(DeadlineExceeded):
        await request.wait(asyncio.Event().wait(), until_s=asyncio.get_running_loop().time())


async def test_who_is_cancelled_from_outside_is_cancelled_and_not_told_otherwise():
    waiting = asyncio.create_task(RunningRequest("job").wait(asyncio.Event().wait()))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
