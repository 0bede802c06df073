"""What is told of a cluster, on the page, on the boards and in the rules: the same names in all."""

import asyncio
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from core.config import ClusterConfig, RedisConfig, SchedulerConfig
from core.fence import Fence
from core.leader_finder import LeaderFinder
from core.messages import BlockCounts, Counter, WorkerLoad, WorkerRef, WorkerRole
from core.metrics.registry import exposition, new_registry
from core.metrics.shared import FenceCollector, RedisCollector
from core.metrics.vllm import Labelled
from core.metrics.worker import WorkerCollector, WorkerMetrics
from core.store.lease import Candidate, MemoryLeases
from core.store.redis_link import RedisLink
from core.telemetry.names import Attr, Event, Operation, SpanName
from core.tickets import Tickets
from deploy.dashboards.generate import BOARDS, FOLDER, as_json
from gateway.cluster_metrics import ClusterCollector as GatewayCollector
from gateway.decode_link import DecodeLinks
from gateway.request_metrics import RequestMetrics
from gateway.scheduler_link import SchedulerLink
from gateway.session import ClusterBackend
from scheduler.desk import SchedulerDesk
from scheduler.election import Election
from scheduler.front_desk import FrontDesk
from scheduler.leader_metrics import LeaderCollector
from scheduler.metrics import ClusterCollector as SchedulerCollector

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "observability.md"
RULES = yaml.safe_load((ROOT / "deploy/prometheus/tandem.rules.yml").read_text())
ALERTS = {
    rule["alert"]: rule for group in RULES["groups"] for rule in group["rules"] if "alert" in rule
}
RECORDED = {
    rule["record"] for group in RULES["groups"] for rule in group["rules"] if "record" in rule
}
OURS = re.compile(r"\b(?:tandem|vllm|gen_ai)[_:][a-z0-9_:]+")


class _State:
    stalled_s = 0.0

    def load(self) -> WorkerLoad:
        counters = (Counter(name="shm_bytes_sent", value=1),)
        blocks = BlockCounts(free=1)
        return WorkerLoad(blocks=blocks, num_running=0, num_waiting=0, counters=counters)

    def leases(self) -> Mapping[str, int]:
        return {"adopted": 0}


def _registry(name: str) -> tuple[CollectorRegistry, Labelled]:
    me = WorkerRef(name=name, incarnation="1")
    registry = new_registry(me, "m")
    return registry, Labelled(registry, me, "m")


def _worker() -> CollectorRegistry:
    registry, vllm = _registry("decode-0")
    WorkerMetrics(registry, vllm)
    collector = WorkerCollector(
        _State(), lambda: WorkerRole.DECODE, num_blocks=1, block_size=16, vllm=vllm
    )
    registry.register(collector)
    return registry


def _scheduler() -> CollectorRegistry:
    registry, _ = _registry("scheduler")
    desk = FrontDesk([SchedulerDesk(SchedulerConfig(), "m", Tickets(bytes(32)))])
    me = WorkerRef(name="scheduler", incarnation="1")
    registry.register(SchedulerCollector(desk, {"m": (1, 1)}, me))
    candidate = Candidate(holder="scheduler/1", address="unix:nowhere")
    leases = MemoryLeases()
    election = Election(leases, candidate, lease_s=2.0, alone=True, on_term=lambda token: None)
    registry.register(LeaderCollector(election))
    return registry


def _gateway() -> CollectorRegistry:
    registry, vllm = _registry("gateway")
    config = ClusterConfig()
    RequestMetrics(vllm, window=512, objectives=config.telemetry)
    me = WorkerRef(name="gateway", incarnation="1")
    scheduler = SchedulerLink(LeaderFinder(["unix:nowhere"], Fence()), me)
    decodes = DecodeLinks(me, asyncio.TaskGroup(), on_ended=scheduler.settle, max_unread_tokens=16)
    registry.register(FenceCollector(Fence()))
    registry.register(RedisCollector(RedisLink("unix:///nowhere", RedisConfig())))
    registry.register(GatewayCollector(ClusterBackend(scheduler, decodes, config.gateway)))
    return registry


def _names(registry: CollectorRegistry) -> Iterator[str]:
    for family in registry.collect():
        suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
        yield f"{family.name}{suffix}"


@pytest.fixture(scope="module")
def told() -> set[str]:
    """Every metric of any process, but those of Python and the kernel."""
    names = {name for make in (_worker, _scheduler, _gateway) for name in _names(make())}
    return {name for name in names if OURS.fullmatch(name)}


def test_every_metric_is_on_the_page_and_no_other(told: set[str]):
    rows = re.findall(r"^\| `([a-z0-9_:]+)` \|", PAGE.read_text(), re.MULTILINE)
    shown = [name for name in rows if OURS.fullmatch(name)]
    assert sorted(shown) == sorted(told)


def _first_cells(heading: str) -> list[str]:
    """Of the rows of the page's table that begins with this."""
    table = PAGE.read_text().split(f"\n| {heading} |", 1)[1].split("\n\n", 1)[0]
    return [row.split("|")[1] for row in table.splitlines()[2:]]


def _quoted(cells: list[str]) -> set[str]:
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def test_every_span_and_event_is_on_the_page_and_no_other():
    served = {f"{operation} MODEL" for operation in Operation}
    assert _quoted(_first_cells("Span")) == served | set(SpanName)
    assert _quoted(_first_cells("Event")) == set(Event)


def test_every_attribute_is_on_the_page_and_no_other():
    """A name that begins with a dot goes on from the one before it."""
    shown = set()
    for cell in _first_cells("Attribute"):
        names = re.findall(r"`([^`]+)`", cell)
        shown |= {names[0], *(_continued(names[0], name) for name in names[1:])}
    assert shown == set(Attr)


def _continued(first: str, name: str) -> str:
    """`gen_ai.request.model` and `.top_k` are `gen_ai.request.top_k`."""
    if not name.startswith("."):
        return name
    parts = first.split(".")
    found = [".".join(parts[:n]) + name for n in range(len(parts) - 1, 0, -1)]
    return next((each for each in found if each in set(Attr)), name)


@pytest.mark.parametrize("make", [_worker, _scheduler, _gateway])
def test_a_scrape_takes_less_than_twenty_milliseconds_of_a_core(
    make: Callable[[], CollectorRegistry],
):
    registry = make()

    def cost_s() -> float:
        begin_s = time.process_time()
        exposition(registry)
        return time.process_time() - begin_s

    assert min(cost_s() for _ in range(5)) < 0.02


def test_no_label_is_unbounded():
    """Labels whose values come from requests would grow without end."""
    allowed = {
        *("operation", "outcome", "reason", "stage", "objective", "kind", "state", "role", "model"),
        *("transport", "engine", "model_name", "finished_reason", "le", "error_type"),
        *("fate", "block_size", "num_gpu_blocks", "version", "process", "incarnation"),
        *(f"gen_ai_{name}" for name in ("operation_name", "provider_name")),
        *(f"gen_ai_{name}_model" for name in ("request", "response")),
        *("implementation", "major", "minor", "patchlevel", "generation"),
    }
    for make in (_worker, _scheduler, _gateway):
        for family in make().collect():
            for sample in family.samples:
                assert set(sample.labels) <= allowed, sample.name


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_a_dashboards_json_is_what_its_code_gives(board: Any):
    assert (FOLDER / f"{board.uid}.json").read_text() == as_json(board)


def _expressions() -> Iterator[str]:
    for path in FOLDER.glob("*.json"):
        for panel in json.loads(path.read_text())["panels"]:
            yield from (target["expr"] for target in panel.get("targets", ()))
    for group in RULES["groups"]:
        yield from (rule["expr"] for rule in group["rules"])


def test_boards_and_rules_ask_for_what_is_told(told: set[str]):
    asked = {name for expr in _expressions() for name in OURS.findall(expr)}
    suffixes = ("", "_bucket", "_sum", "_count")
    known = RECORDED | {f"{name}{suffix}" for name in told for suffix in suffixes}
    assert asked - known == set()
    assert len(asked) > 30


def test_every_alert_has_its_runbook_and_every_runbook_its_alert():
    pages = {path.stem for path in (ROOT / "docs/runbooks").glob("Tandem*.md")}
    assert pages == set(ALERTS)
    for name, rule in ALERTS.items():
        assert rule["annotations"]["runbook_url"] == f"docs/runbooks/{name}.md"
        assert rule["labels"]["severity"] in {"page", "ticket"}


def test_the_collectors_configuration_scrapes_what_the_scheduler_tells():
    config = yaml.safe_load((ROOT / "deploy/collector/collector.yml").read_text())
    (job,) = config["receivers"]["prometheus"]["config"]["scrape_configs"]
    assert job["http_sd_configs"][0]["url"].endswith("/sd")
    for pipeline in config["service"]["pipelines"].values():
        assert set(pipeline["receivers"]) <= set(config["receivers"])
        assert set(pipeline["processors"]) <= set(config["processors"])
        assert set(pipeline["exporters"]) <= set(config["exporters"])
