"""Metrics pushed to an OpenTelemetry collector, for who does not scrape.

The registry is read on the event loop, as at a scrape, since what it reads lives there. Sending is
a thread's; a collector that is slow or away costs the report, and is tried again with the next.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import structlog
from prometheus_client import CollectorRegistry

from core.errors import ConfigError
from core.process import ProcessContext

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricExporter

_DEFAULT_INTERVAL_MS = 60_000.0
_LAST_TIMEOUT_S = 3.0
_SETTING = "telemetry.otlp_metrics_endpoint"


@contextlib.asynccontextmanager
async def exported(context: ProcessContext, registry: CollectorRegistry) -> AsyncIterator[None]:
    """Sends the registry's metrics while the context lasts, and once more at its end.

    Where `telemetry.otlp_metrics_endpoint` or OTEL_EXPORTER_OTLP_METRICS_ENDPOINT names a
    collector. Raises ConfigError for one that will not do.
    """
    endpoint = _endpoint(context)
    if endpoint is None or context.role is None:
        yield
        return
    from core.telemetry.otlp import metric_exporter, sdk_logs_are_ours

    interval_s = _interval_s()
    with sdk_logs_are_ours():
        report = Report(context, registry, metric_exporter(endpoint, _SETTING))
        reporting = asyncio.create_task(report.every(interval_s))
        try:
            yield
        finally:
            reporting.cancel()
            await asyncio.wait({reporting})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_TIMEOUT_S):
                    await report.send()
            report.close()


class Report:
    """One process's metrics, and the exporter that they go to."""

    def __init__(
        self, context: ProcessContext, registry: CollectorRegistry, exporter: "MetricExporter"
    ) -> None:
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        from core.telemetry.resource import resource_of, version

        assert context.role is not None
        self._registry = registry
        self._exporter = exporter
        self._resource = resource_of(context.role, context.me)
        self._scope = InstrumentationScope("tandem", version())
        self._began_ns = time.time_ns()
        self._log = structlog.get_logger()

    async def every(self, interval_s: float) -> None:
        """Sends until it is cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            await self.send()

    async def send(self) -> None:
        """Sends what is measured up to now. What cannot be sent is left to the next time."""
        from opentelemetry.sdk.metrics.export import MetricExportResult

        from core.metrics.readable import readable

        told = readable(
            self._registry,
            self._resource,
            self._scope,
            began_ns=self._began_ns,
            now_ns=time.time_ns(),
        )
        result = await asyncio.to_thread(self._exporter.export, told)
        if result is not MetricExportResult.SUCCESS:
            self._log.warning("metrics_not_exported")

    def close(self) -> None:
        """Ends what is under way."""
        self._exporter.shutdown()


def _endpoint(context: ProcessContext) -> str | None:
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    return (
        context.config.telemetry.otlp_metrics_endpoint
        or os.environ.get("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")
        or None
    )


def _interval_s() -> float:
    """OTEL_METRIC_EXPORT_INTERVAL, which is in milliseconds."""
    told = os.environ.get("OTEL_METRIC_EXPORT_INTERVAL") or str(_DEFAULT_INTERVAL_MS)
    try:
        interval_s = float(told) / 1000
    except ValueError:
        interval_s = 0.0
    if not 0.1 <= interval_s <= 86400:
        raise ConfigError(
            f"OTEL_METRIC_EXPORT_INTERVAL: {told!r} is no number of milliseconds from 100 to a day"
        )
    return interval_s
