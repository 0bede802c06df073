"""The one registry of a process, made at its start and handed down."""

from importlib import metadata

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    Info,
    PlatformCollector,
    generate_latest,
)
from prometheus_client.process_collector import ProcessCollector

from core.messages import WorkerRef
from core.metrics.spans import SpanCollector
from core.telemetry.tracer import NO_TRACER, Tracer

_DISTRIBUTION = "tandem-llm"


def new_registry(me: WorkerRef, model: str, tracer: Tracer = NO_TRACER) -> CollectorRegistry:
    """A registry with what Python and the kernel say of this process, who it is, and its spans."""
    registry = CollectorRegistry()
    registry.register(SpanCollector(tracer))
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    build = Info("tandem_build", "This process, its software and its model.", registry=registry)
    build.info(
        {
            "version": metadata.version(_DISTRIBUTION),
            "process": me.name,
            "incarnation": me.incarnation,
            "model_name": model,
        }
    )
    return registry


def exposition(registry: CollectorRegistry) -> bytes:
    """One scrape, in Prometheus' text format 0.0.4, whatever else was asked for.

    The library's OpenMetrics turns the colons of `vllm:` into underscores.
    """
    return generate_latest(registry)
