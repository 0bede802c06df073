"""What the scheduler tells people and Prometheus of its cluster."""

from typing import Any

import httpx
from prometheus_client import CollectorRegistry

from core.config import SchedulerConfig
from core.health import Health
from core.messages import (
    BlockCounts,
    Compatibility,
    Endpoint,
    Enqueue,
    GatewayHello,
    TransferId,
    WorkerHello,
    WorkerLoad,
    WorkerRef,
    WorkerRole,
)
from core.tickets import Tickets
from scheduler.admin import create_admin_app
from scheduler.desk import SchedulerDesk
from scheduler.front_desk import FrontDesk
from scheduler.metrics import ClusterCollector

GATEWAY = WorkerRef(name="gateway", incarnation="g1")


def _desk(*models: str) -> FrontDesk:
    tickets = Tickets(bytes(32))
    return FrontDesk([SchedulerDesk(SchedulerConfig(), m, tickets) for m in models or ("m",)])


def _hello(name: str = "decode-0", role: WorkerRole = WorkerRole.DECODE) -> WorkerHello:
    return WorkerHello(
        endpoint=Endpoint(worker=WorkerRef(name=name, incarnation="1"), address=f"unix:{name}"),
        role=role,
        compatibility=Compatibility(
            model="m", revision="1", dtype="d", block_size=16, block_bytes=8, layout="", protocol=1
        ),
        num_blocks=4,
        max_seqs=8,
        max_step_tokens=512,
        local_prefill=role is WorkerRole.DECODE,
        admin_address=f"127.0.0.1:{9000 + len(name)}",
        model="m",
    )


def _joins(front: FrontDesk, hello: WorkerHello, **load: Any) -> None:
    values = {"blocks": BlockCounts(free=4), "num_running": 0, "num_waiting": 0}
    desk, member = front.worker_joined(hello)
    desk.worker_says(member, WorkerLoad(**(values | load)))


def _registry(desk: FrontDesk) -> CollectorRegistry:
    registry = CollectorRegistry()
    me = WorkerRef(name="scheduler", incarnation="s1")
    registry.register(ClusterCollector(desk, dict.fromkeys(desk.desks, (1, 1)), me))
    return registry


async def _get(desk: FrontDesk, path: str) -> Any:
    app = create_admin_app(desk, _registry(desk), Health(), "127.0.0.1:8001")
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
        return (await client.get(path)).json()


def test_placements_are_counted_by_who_reads_the_prompt():
    desk = _desk()
    registry = _registry(desk)
    assert (
        registry.get_sample_value("tandem_placements_total", {"model": "m", "kind": "local"}) == 0
    )
    desk.desks["m"].num_placements["local"] += 1
    assert (
        registry.get_sample_value("tandem_placements_total", {"model": "m", "kind": "local"}) == 1
    )
    assert (
        registry.get_sample_value(
            "tandem_placements_total", {"model": "m", "kind": "disaggregated"}
        )
        == 0
    )


def test_the_queue_is_told_by_what_it_waits_for():
    desk = _desk()
    desk.gateway_says(str(GATEWAY), GatewayHello(gateway=GATEWAY), lambda message: True)
    waits = Enqueue(
        transfer=TransferId(request_id="r", attempt=1),
        model="m",
        prompt_tokens=8,
        max_new_tokens=8,
        remaining_s=60.0,
    )
    desk.gateway_says(str(GATEWAY), waits, lambda message: True)
    registry = _registry(desk)

    def queued(reason: str) -> float | None:
        return registry.get_sample_value("tandem_queued_requests", {"model": "m", "reason": reason})

    assert (queued("no_workers"), queued("capacity")) == (1, 0)
    _joins(desk, _hello())
    assert (queued("no_workers"), queued("capacity")) == (0, 1)


def test_pools_are_told_beside_what_they_should_be():
    desk = _desk()
    _joins(desk, _hello())
    _joins(desk, _hello("prefill-0", WorkerRole.PREFILL), draining=True)
    registry = _registry(desk)

    def workers(role: str, state: str) -> float | None:
        return registry.get_sample_value(
            "tandem_workers", {"model": "m", "role": role, "state": state}
        )

    assert (workers("decode", "ready"), workers("decode", "not_ready")) == (1, 0)
    assert (workers("prefill", "ready"), workers("prefill", "not_ready")) == (0, 1)
    assert (
        registry.get_sample_value("tandem_workers_configured", {"model": "m", "role": "prefill"})
        == 1
    )


async def test_prometheus_is_told_of_every_process_and_of_none_that_left():
    desk = _desk()

    def reply(message: object) -> bool:
        return True

    hello = GatewayHello(gateway=GATEWAY, admin_address="127.0.0.1:9100")
    desk.gateway_says(str(GATEWAY), hello, reply)
    _joins(desk, _hello())
    found = {each["labels"]["process"]: each for each in await _get(desk, "/sd")}
    assert set(found) == {"scheduler", "gateway", "decode-0"}
    assert found["gateway"]["targets"] == ["127.0.0.1:9100"]
    assert found["scheduler"]["targets"] == ["127.0.0.1:8001"]
    assert found["decode-0"]["labels"] == {"process": "decode-0", "role": "decode"}
    assert len((await _get(desk, "/cluster"))["scrape_targets"]) == 3
    desk.gateway_left(str(GATEWAY), reply)
    assert {each["labels"]["process"] for each in await _get(desk, "/sd")} == {
        "scheduler",
        "decode-0",
    }


async def test_the_clusters_page_has_each_workers_report():
    desk = _desk()
    _joins(
        desk,
        _hello(),
        blocks=BlockCounts(free=1, cached=3),
        num_running=2,
        num_preempted=1,
        backlog_tokens=70,
        prefill_tokens_per_s=900.0,
        step_s=0.02,
    )
    shown = await _get(desk, "/cluster")
    assert shown["placements"] == {"disaggregated": 0, "local": 0}
    (worker,) = shown["workers"]
    assert worker["local_prefill"] is True
    assert worker["admin_address"] == "127.0.0.1:9008"
    assert worker["blocks"]["cached"] == 3
    assert (worker["num_preempted"], worker["backlog_tokens"]) == (1, 70)
    assert (worker["prefill_tokens_per_s"], worker["step_s"]) == (900.0, 0.02)
