"""What a scheduler that stands by answers on its admin port: who leads, and where."""

from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from core.config import SchedulerConfig
from core.health import Health
from core.store.lease import Candidate, MemoryLeases
from core.tickets import Tickets
from scheduler.admin import create_admin_app
from scheduler.desk import SchedulerDesk
from scheduler.election import Election
from scheduler.front_desk import FrontDesk

LEADER = "10.0.0.4:9100"


def election(store: MemoryLeases, name: str, admin_address: str) -> Election:
    me = Candidate(holder=f"{name}/1", address=f"unix:/{name}", admin_address=admin_address)
    return Election(store, me, lease_s=60.0, alone=False, on_term=lambda token: None)


@pytest.fixture
async def standby() -> Election:
    """Of two, the one that came second."""
    store = MemoryLeases()
    leads = election(store, "scheduler", LEADER)
    stands_by = election(store, "scheduler-1", "10.0.0.5:9100")
    await leads.step()
    await stands_by.step()
    return stands_by


async def ask(of: Election | None, method: str, path: str, **more: Any) -> httpx.Response:
    desk = FrontDesk([SchedulerDesk(SchedulerConfig(), "m", Tickets(b"secret" * 4))])
    app = create_admin_app(desk, CollectorRegistry(), Health(), "10.0.0.5:9100", election=of)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://10.0.0.5:9100") as client:
        return await client.request(method, path, **more)


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_standby_names_the_leader_and_sends_who_asks_for_its_split_there(standby, method):
    answer = await ask(standby, method, "/scale?model=m", json={"prefill": 1, "decode": 1})
    assert answer.status_code == 307
    assert answer.headers["location"] == f"http://{LEADER}/scale?model=m"
    told = answer.json()["error"]
    assert told["leader"] == {"scheduler": "scheduler/1", "admin_address": LEADER}
    assert "this scheduler stands by; scheduler/1 leads" in told["message"]


async def test_where_nobody_is_known_to_lead_a_standby_says_that(standby):
    unknowing = election(MemoryLeases(), "scheduler-1", "10.0.0.5:9100")
    answer = await ask(unknowing, "GET", "/scale")
    assert answer.status_code == 503
    assert "knows of none that leads" in answer.json()["error"]["message"]


async def test_the_view_of_a_standby_says_where_the_leaders_is(standby):
    told = (await ask(standby, "GET", "/cluster")).json()["leader"]
    assert (told["leads"], told["leader"]) == (False, "scheduler/1")
    assert told["admin_address"] == LEADER


async def test_one_that_nobody_can_replace_answers_itself():
    assert (await ask(None, "GET", "/scale")).status_code == 200
