"""A worker leaves in order: asked by a signal or over HTTP, and within its time."""

import asyncio

import httpx
from starlette.applications import Starlette

from core.drain import Drain


class Worker:
    def __init__(self):
        self.empty = asyncio.Event()
        self.gave_up = False

    async def drained(self):
        await self.empty.wait()

    def hand_over(self):
        self.gave_up = True
        self.empty.set()


class Registration:
    num_reports = 0

    def report_now(self):
        self.num_reports += 1


async def ask(drain, method, **headers):
    transport = httpx.ASGITransport(app=Starlette(routes=drain.routes))
    async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
        return await client.request(method, "/drain", headers=headers)


async def test_it_waits_for_what_runs_and_tells_the_scheduler_at_once():
    worker, registration = Worker(), Registration()
    drain = Drain(worker, registration, timeout_s=60)
    running = asyncio.create_task(drain.run())
    await asyncio.sleep(0.01)
    assert registration.num_reports == 1
    assert (await ask(drain, "GET")).json() == {"draining": True, "drained": False}
    worker.empty.set()
    await running
    assert not worker.gave_up
    assert (await ask(drain, "GET")).json() == {"draining": True, "drained": True}


async def test_what_outlasts_the_time_is_given_up():
    worker = Worker()
    await Drain(worker, Registration(), timeout_s=0).run()
    assert worker.gave_up


async def test_it_can_be_asked_for_over_http():
    drain = Drain(Worker(), Registration(), timeout_s=60)
    assert (await ask(drain, "GET")).json() == {"draining": False, "drained": False}
    answer = await ask(drain, "POST", **{"content-type": "application/json"})
    assert (answer.status_code, drain.asked.is_set()) == (202, True)


async def test_a_web_page_cannot_ask():
    drain = Drain(Worker(), Registration(), timeout_s=60)
    assert (await ask(drain, "POST")).status_code == 415
    assert not drain.asked.is_set()
