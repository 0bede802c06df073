"""A worker's metrics: its desk at the scrape, its counters under names of their own."""

from collections.abc import Mapping

import pytest
from prometheus_client import CollectorRegistry

from core.messages import BlockCounts, Counter, WorkerLoad, WorkerRef, WorkerRole
from core.metrics import buckets
from core.metrics.vllm import Labelled
from core.metrics.worker import WorkerCollector, WorkerMetrics

VLLM = {"engine": "3", "model_name": "m"}
COUNTED = {
    "integrity_failures": 2,
    "refused_overloaded": 5,
    "shm_bytes_sent": 1000,
    "shm_busy_us": 2_500_000,
    "cuda_ipc_pairings": 1,
    "prefix_cache_queries": 40,
    "prefix_cache_hits": 16,
    "preemptions": 3,
    "something_new": 7,
}


class State:
    stalled_s = 1.5

    def load(self) -> WorkerLoad:
        return WorkerLoad(
            blocks=BlockCounts(free=2, owned=5, cached=3),
            num_running=4,
            num_waiting=2,
            num_preempted=1,
            backlog_tokens=70,
            counters=tuple(Counter(name=name, value=n) for name, n in COUNTED.items()),
        )

    def leases(self) -> Mapping[str, int]:
        return {"adopted": 4, "receiving": 0}


def _registry(role: WorkerRole) -> CollectorRegistry:
    registry = CollectorRegistry()
    vllm = Labelled(registry, WorkerRef(name="decode-3", incarnation="1"), "m")
    registry.register(
        WorkerCollector(State(), lambda: role, num_blocks=10, block_size=16, vllm=vllm)
    )
    return registry


@pytest.fixture
def registry() -> CollectorRegistry:
    return _registry(WorkerRole.DECODE)


@pytest.mark.parametrize(
    ("name", "labels", "value"),
    [
        ("tandem_kv_blocks", {"state": "owned"}, 5),
        ("tandem_kv_pool_blocks", {}, 10),
        ("tandem_sequences", {"state": "preempted"}, 1),
        ("tandem_leases", {"state": "receiving"}, 0),
        ("tandem_step_stalled_seconds", {}, 1.5),
        ("tandem_integrity_failures_total", {}, 2),
        ("tandem_refusals_total", {"reason": "overloaded"}, 5),
        ("tandem_kv_transfer_bytes_sent_total", {"transport": "shm"}, 1000),
        ("tandem_kv_transfer_busy_seconds_total", {"transport": "shm"}, 2.5),
        ("tandem_kv_transfer_pairings_total", {"transport": "cuda_ipc"}, 1),
        ("tandem_something_new_total", {}, 7),
        ("vllm:prefix_cache_queries_total", VLLM, 40),
        ("vllm:prefix_cache_hits_total", VLLM, 16),
        ("vllm:num_preemptions_total", VLLM, 3),
        ("vllm:num_requests_running", VLLM, 4),
        ("vllm:num_requests_waiting", VLLM, 3),
        ("vllm:num_requests_waiting_by_reason", {**VLLM, "reason": "deferred"}, 2),
        ("vllm:kv_cache_usage_perc", VLLM, 0.5),
    ],
)
def test_what_the_desk_says_has_its_name(
    registry: CollectorRegistry, name: str, labels: dict[str, str], value: float
):
    assert registry.get_sample_value(name, labels) == value


def test_what_an_alert_asks_for_is_there_before_it_happens(registry: CollectorRegistry):
    assert registry.get_sample_value("tandem_ledger_errors_total") == 0
    assert registry.get_sample_value("tandem_stale_messages_total") == 0


def test_a_request_is_counted_as_running_by_one_worker_alone():
    prefill = _registry(WorkerRole.PREFILL)
    assert prefill.get_sample_value("vllm:num_requests_running", VLLM) is None
    assert prefill.get_sample_value("vllm:kv_cache_usage_perc", VLLM) == 0.5


def test_steps_and_transfers_are_measured():
    registry = CollectorRegistry()
    vllm = Labelled(registry, WorkerRef(name="decode-3", incarnation="1"), "m")
    metrics = WorkerMetrics(registry, vllm)
    metrics.stepped(3, 0, 0.02)
    metrics.stepped(0, 100, 0.2)
    metrics.stepped(2, 5, 0.05)
    for kind, seconds in (("decode", 0.02), ("prefill", 0.2), ("mixed", 0.05)):
        assert registry.get_sample_value("tandem_step_seconds_sum", {"kind": kind}) == seconds
    assert registry.get_sample_value("vllm:iteration_tokens_total_sum", VLLM) == 110
    metrics.transferred("shm", 4_000_000_000, 2.0)
    metrics.transferred("shm", 0, 0.0)  # all of it was cached: no transfer
    shm = {"transport": "shm"}
    assert registry.get_sample_value("tandem_kv_transfer_seconds_count", shm) == 1
    speed = "tandem_kv_transfer_gigabytes_per_second"
    assert registry.get_sample_value(f"{speed}_sum", shm) == 2.0


def test_lengths_have_vllms_bounds():
    assert buckets.token_counts(512) == (1, 2, 5, 10, 20, 50, 100, 200, 500)
    assert buckets.token_counts(1) == (1,)
