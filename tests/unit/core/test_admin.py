"""Every process's admin server: metrics and the three probes, told apart."""

from typing import Any

import httpx
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette

from core.admin import admin_routes, authority
from core.health import Health
from core.messages import WorkerRef
from core.metrics.registry import new_registry
from core.metrics.vllm import Labelled

ME = WorkerRef(name="decode-1", incarnation="ab")


async def _get(
    health: Health, path: str, accept: str = "", registry: CollectorRegistry | None = None
) -> httpx.Response:
    app = Starlette(routes=admin_routes(registry or new_registry(ME, "m"), health))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
        return await client.get(path, headers={"accept": accept})


async def _probe(health: Health, path: str) -> tuple[int, dict[str, Any]]:
    response = await _get(health, path)
    return response.status_code, response.json()


async def test_a_process_that_loads_is_alive_and_neither_started_nor_ready():
    health = Health()
    health.starting("the model is being loaded")
    assert (await _probe(health, "/livez"))[0] == 200
    for path in ("/startupz", "/readyz"):
        assert await _probe(health, path) == (
            503,
            {"ok": False, "reason": "the model is being loaded"},
        )
    health.started()
    for path in ("/livez", "/startupz", "/readyz"):
        assert await _probe(health, path) == (200, {"ok": True, "reason": ""})


async def test_a_busy_process_is_not_ready_and_alive():
    health = Health()
    health.started()
    health.ready_if(lambda: "it is draining")
    assert (await _probe(health, "/readyz"))[1]["reason"] == "it is draining"
    assert (await _probe(health, "/livez"))[0] == 200


async def test_a_process_that_stands_still_is_not_alive_though_it_answers():
    health = Health()
    health.started()
    health.alive_if(lambda: "the step loop stands still")
    assert await _probe(health, "/livez") == (
        503,
        {"ok": False, "reason": "the step loop stands still"},
    )


async def test_names_keep_their_colons_also_where_openmetrics_is_asked_for():
    registry = new_registry(ME, "m")
    Labelled(registry, ME, "m").counter("vllm:generation_tokens", "Tokens.").inc()
    asked = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
    for accept in ("", asked):
        response = await _get(Health(), "/metrics", accept, registry)
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert 'process="decode-1"' in response.text
        assert "process_resident_memory_bytes" in response.text
        assert 'vllm:generation_tokens_total{engine="1",model_name="m"} 1.0' in response.text


def test_addresses_are_written_for_others():
    assert authority("127.0.0.1", 1) == "127.0.0.1:1"
    assert authority("::1", 1) == "[::1]:1"
    assert not authority("0.0.0.0", 1).startswith("0.0.0.0")
    assert authority("0.0.0.0", 1, "10.0.0.7") == "10.0.0.7:1"
    assert authority("127.0.0.1", 1, "10.0.0.7") == "127.0.0.1:1"
