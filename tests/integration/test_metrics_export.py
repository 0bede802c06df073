"""A process's metrics, pushed to a collector."""

import asyncio

import pytest

from bench.otlp_receiver import OtlpReceiver
from core.config import ClusterConfig, TelemetryConfig
from core.errors import ConfigError
from core.messages import WorkerRef
from core.metrics.export import exported
from core.metrics.registry import new_registry
from core.process import ProcessContext
from core.telemetry.names import Role

ME = WorkerRef(name="decode-0", incarnation="abcd")


@pytest.fixture
def context(tmp_path):
    def make(endpoint):
        config = ClusterConfig(telemetry=TelemetryConfig(otlp_metrics_endpoint=endpoint))
        return ProcessContext(
            run_dir=tmp_path,
            me=ME,
            cluster=config,
            config=config,
            models=(),
            role=Role.DECODE_WORKER,
        )

    return make


async def test_the_whole_registry_is_sent_in_intervals_and_at_the_end(context, monkeypatch):
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "100")
    registry = new_registry(ME, "m")
    with OtlpReceiver() as receiver:
        async with exported(context(receiver.endpoint), registry):
            await asyncio.to_thread(receiver.wait_for_metrics)
        reports = [metric for service, metric in receiver.metrics if metric.name == "tandem_build"]
        services = {service for service, _ in receiver.metrics}
    assert len(reports) >= 2
    assert services == {"tandem-decode-worker"}
    assert {"tandem_spans", "process_resident_memory_bytes"} <= {
        metric.name for _, metric in receiver.metrics
    }


async def test_a_collector_that_is_away_costs_the_report_alone(context, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    async with asyncio.timeout(30), exported(context("http://127.0.0.1:1"), new_registry(ME, "m")):
        pass


async def test_nothing_is_sent_where_no_collector_is_named(context, monkeypatch):
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", raising=False)
    before = asyncio.all_tasks()
    async with exported(context(None), new_registry(ME, "m")):
        assert asyncio.all_tasks() == before


@pytest.mark.parametrize("interval", ["soon", "0", "1e12"])
async def test_an_interval_out_of_bounds_is_refused_by_name(context, monkeypatch, interval):
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", interval)
    with pytest.raises(ConfigError, match="OTEL_METRIC_EXPORT_INTERVAL"):
        async with exported(context("http://127.0.0.1:1"), new_registry(ME, "m")):
            pass
