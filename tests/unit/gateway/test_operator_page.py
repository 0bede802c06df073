"""The operators' page: small, complete by itself, and told to load nothing from elsewhere."""

import re
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette

import gateway
from core.config import TelemetryConfig
from core.errors import Unavailable
from gateway.latency_curves import LatencyCurves
from gateway.operator_page import page_routes
from gateway.recent import RecentRequests
from gateway.request_metrics import unread_metrics
from gateway.request_record import RequestRecord

PAGE = Path(gateway.__file__).parent / "page"
MAX_BYTES = 300_000


async def no_cluster():
    raise Unavailable("the scheduler is away")


@pytest.fixture
def recent():
    return RecentRequests(10)


@pytest.fixture
async def admin(recent):
    models = ["m", "other"]
    curves = LatencyCurves([unread_metrics(name, TelemetryConfig()) for name in models], recent)
    app = Starlette(routes=page_routes(recent, curves, no_cluster, models=models))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
        yield client


async def test_every_file_of_the_page_is_served_and_refers_to_nothing_else(admin):
    page = await admin.get("/")
    assert page.headers["content-type"].startswith("text/html")
    named, size = set(re.findall(r'(?:src|href)="([^"]+)"', page.text)) - {"data:,"}, 0
    served = {"/": page}
    while named:
        path = named.pop()
        answer = served[path] = await admin.get(path)
        assert answer.status_code == 200, path
        imports = re.findall(r'from "\./([^"]+)"', answer.text)
        named |= {f"/page/{name}" for name in imports} - set(served)
    for answer in served.values():
        size += len(answer.content)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert not re.search(r"https?://(?!www\.w3\.org/)", answer.text)
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", answer.text
        )
    assert {Path(path).name or "index.html" for path in served} == {p.name for p in PAGE.iterdir()}
    assert size < MAX_BYTES


async def test_requests_are_listed_searched_and_found(admin, recent):
    mine = RequestRecord(request_id="mine-1", job="chatcmpl-1", operation="chat", model="m")
    recent.add(mine, 200)
    listed = (await admin.get("/requests")).json()
    assert (listed["kept"], listed["models"]) == (1, ["m", "other"])
    assert (await admin.get("/requests?model=m")).json()["requests"] == listed["requests"]
    assert (await admin.get("/requests?model=other")).json()["requests"] == []
    assert (await admin.get("/requests?search=nothing")).json()["requests"] == []
    (found,) = (await admin.get("/requests/mine-1")).json()["requests"]
    assert found["job"] == "chatcmpl-1" and found["stages"] == []
    lost = await admin.get("/requests/other-1")
    assert lost.status_code == 404 and "6 characters" in lost.json()["error"]


@pytest.mark.parametrize(
    "query, named", [("limit=0", "limit"), ("limit=x", "limit"), ("search=" + "a" * 257, "search")]
)
async def test_a_query_out_of_bounds_is_refused_by_name(admin, query, named):
    answer = await admin.get(f"/requests?{query}")
    assert answer.status_code == 400 and answer.json()["error"].startswith(named)


@pytest.mark.parametrize("path", ["/requests", "/latency"])
async def test_a_model_that_is_not_served_is_refused_by_name(admin, path):
    answer = await admin.get(f"{path}?model=another")
    assert (answer.status_code, answer.json()) == (400, {"error": "model: must be one of m, other"})


async def test_a_scheduler_that_is_away_is_said_to_be(admin):
    answer = await admin.get("/cluster")
    assert (answer.status_code, answer.json()) == (503, {"error": "the scheduler is away"})
    assert (await admin.get("/latency")).json()["samples"] == []
