"""The SDK's OTLP exporters over gRPC, with endpoint and variables checked before they begin.

The exporters read the variables of https://opentelemetry.io/docs/specs/otel/protocol/exporter/
themselves, but pass over some that are wrong.
"""

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import structlog
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SpanExportResult

from core.errors import ConfigError
from core.telemetry.encoder import Encoder
from core.telemetry.trace import RequestTrace

_DEFAULT_PORT = 4317
_FILES = ("CERTIFICATE", "CLIENT_KEY", "CLIENT_CERTIFICATE")
_SDK_LOGGER = "opentelemetry"


class OtlpSender:
    """One collector of traces. Implements `exporter.Sender`.

    The SDK tries a batch again, with growing pauses, for OTEL_EXPORTER_OTLP_TIMEOUT seconds.
    """

    def __init__(self, endpoint: str, encoder: Encoder) -> None:
        """`endpoint` is http://HOST:PORT, or https:// for TLS. Raises ConfigError."""
        target = checked_endpoint(endpoint, "telemetry.otlp_endpoint")
        check_variables("TRACES")
        self._exporter = _Exporter(encoder, target)

    def send(self, traces: Sequence[RequestTrace]) -> bool:
        batch = cast("Sequence[Any]", traces)  # no spans of the SDK's, which it hands on unread
        return self._exporter.export(batch) is SpanExportResult.SUCCESS

    def close(self) -> None:
        self._exporter.shutdown()


class _Exporter(OTLPSpanExporter):
    """Connects and tries again as the SDK's does; what it sends is encoded by us.

    `_translate_data` and `_count_data` are what the SDK has its own exporters of traces, metrics
    and logs fill in.
    """

    def __init__(self, encoder: Encoder, target: str) -> None:
        super().__init__(endpoint=target, insecure=target.startswith("http:"))
        self._encoder = encoder

    def _translate_data(self, data: Sequence[Any]) -> ExportTraceServiceRequest:
        return self._encoder.request(data)

    def _count_data(self, data: Sequence[Any]) -> int:
        return sum(len(trace.spans) for trace in data)


def metric_exporter(endpoint: str, setting: str) -> OTLPMetricExporter:
    """`endpoint` as above, named by this setting. Raises ConfigError."""
    target = checked_endpoint(endpoint, setting)
    check_variables("METRICS")
    return OTLPMetricExporter(endpoint=target, insecure=target.startswith("http:"))


def checked_endpoint(endpoint: str, setting: str) -> str:
    """The endpoint with its port. Raises ConfigError, which names the setting."""
    try:
        parts = urlsplit(endpoint)
        port = parts.port or _DEFAULT_PORT
    except ValueError:
        parts, port = urlsplit(""), 0
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{setting}: {endpoint!r} is not http://HOST:PORT or https")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{port}"


def check_variables(signal: str) -> None:
    """Raises ConfigError for a variable of this signal, TRACES or METRICS, that will not do."""
    if (protocol := _variable(signal, "PROTOCOL") or "grpc") != "grpc":
        raise ConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL: {protocol} is not served; grpc is")
    try:
        float(_variable(signal, "TIMEOUT") or 10)
    except ValueError as error:
        raise ConfigError("OTEL_EXPORTER_OTLP_TIMEOUT is no number of seconds") from error
    if (compression := _variable(signal, "COMPRESSION") or "gzip").strip().lower() != "gzip":
        raise ConfigError(f"OTEL_EXPORTER_OTLP_COMPRESSION: {compression} is not served; gzip is")
    for name in _FILES:
        if (path := _variable(signal, name)) is not None:
            try:
                Path(path).read_bytes()
            except OSError as error:
                raise ConfigError(f"cannot read {path}: {error.strerror}") from error


@contextlib.contextmanager
def sdk_logs_are_ours() -> Iterator[None]:
    """While the context lasts, the SDK's errors are lines like any other of this process.

    Within another one it changes nothing.
    """
    logger, handler = logging.getLogger(_SDK_LOGGER), _ToStructlog(logging.ERROR)
    if any(isinstance(each, _ToStructlog) for each in logger.handlers):
        yield
        return
    propagated, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagated


class _ToStructlog(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        structlog.get_logger().warning("opentelemetry", why=record.getMessage())


def _variable(signal: str, name: str) -> str | None:
    return (
        os.environ.get(f"OTEL_EXPORTER_OTLP_{signal}_{name}")
        or os.environ.get(f"OTEL_EXPORTER_OTLP_{name}")
        or None
    )
