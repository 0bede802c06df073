"""From settings and OpenTelemetry's standard variables to one process's tracer."""

import contextlib
import os
from collections.abc import Iterator

from core.config import TelemetryConfig
from core.errors import ConfigError
from core.messages import WorkerRef
from core.telemetry.exporter import SpanExporter
from core.telemetry.names import Role
from core.telemetry.tracer import Tracer

_SCOPE = "tandem"
_SAMPLERS = {"always_on": 1.0, "always_off": 0.0}


@contextlib.contextmanager
def tracing(config: TelemetryConfig, role: Role, me: WorkerRef) -> Iterator[Tracer]:
    """The process's tracer while the context lasts; leaving it sends what is queued.

    It traces where an endpoint is configured, or OTEL_EXPORTER_OTLP_(TRACES_)ENDPOINT names one,
    and OTEL_SDK_DISABLED is not true. Raises ConfigError for an endpoint that will not do.
    """
    endpoint = config.otlp_endpoint or _endpoint_in_environment()
    if endpoint is None or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        yield Tracer(config)
        return
    from core.telemetry.otlp import sdk_logs_are_ours  # only who traces pays for the import

    with sdk_logs_are_ours():
        tracer = _tracer(config, endpoint, role, me)
        try:
            yield tracer
        finally:
            tracer.close()


def _tracer(config: TelemetryConfig, endpoint: str, role: Role, me: WorkerRef) -> Tracer:
    from core.telemetry.encoder import Encoder
    from core.telemetry.otlp import OtlpSender
    from core.telemetry.resource import resource_of, version

    if config.sample_ratio is None:
        config = config.model_copy(update={"sample_ratio": _ratio_in_environment()})
    sender = OtlpSender(endpoint, Encoder(resource_of(role, me), _SCOPE, version()))
    return Tracer(config, SpanExporter(sender, max_spans=config.max_queued_spans))


def _endpoint_in_environment() -> str | None:
    return (
        os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
        or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
        or None
    )


def _ratio_in_environment() -> float:
    """What OTEL_TRACES_SAMPLER says; everything where it says nothing."""
    told = os.environ.get("OTEL_TRACES_SAMPLER") or "parentbased_always_on"
    name = told.removeprefix("parentbased_")
    if name in _SAMPLERS:
        return _SAMPLERS[name]
    argument = os.environ.get("OTEL_TRACES_SAMPLER_ARG") or "1"
    try:
        ratio = float(argument)
    except ValueError:
        ratio = -1.0
    if name != "traceidratio" or not 0 <= ratio <= 1:
        raise ConfigError(
            f"OTEL_TRACES_SAMPLER={name} with argument {argument!r} is not served: "
            "always_on, always_off, or traceidratio with a number from 0 to 1"
        )
    return ratio
