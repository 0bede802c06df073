"""Structured logs on stderr: JSON lines, or colours on a terminal. Never prompts or answers.

A process that gets SIGUSR1 logs everything from then on, and with SIGUSR2 as configured again.
"""

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog

from core.config import ClusterConfig

EVERYTHING, AS_CONFIGURED = signal.SIGUSR1, signal.SIGUSR2
_LEVELS = logging.getLevelNamesMapping()


class LogLevel:
    """The first processor: drops what is below the level of the moment."""

    def __init__(self, configured: str) -> None:
        self._configured = self._least = _LEVELS[configured.upper()]

    def __call__(
        self, _: object, method: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        if _LEVELS.get(method.upper(), logging.CRITICAL) < self._least:
            raise structlog.DropEvent
        return event

    def everything(self) -> None:
        """From now on every line."""
        self._least = logging.DEBUG

    def as_configured(self) -> None:
        """From now on what the configuration says."""
        self._least = self._configured

    def follow_signals(self) -> None:
        """Changes with the signals, where this thread has an event loop that gets them."""
        with contextlib.suppress(RuntimeError, ValueError):
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(EVERYTHING, self.everything)
            loop.add_signal_handler(AS_CONFIGURED, self.as_configured)


def configure(config: ClusterConfig, process: str) -> structlog.stdlib.BoundLogger:
    """Sets this process's logging up and gives a logger. Every line of any has `process`."""
    level = LogLevel(config.log_level)
    level.follow_signals()
    pretty = config.log_format == "pretty" or (config.log_format == "auto" and sys.stderr.isatty())
    renderer = (
        structlog.dev.ConsoleRenderer(pad_event_to=0)
        if pretty
        else structlog.processors.JSONRenderer()
    )

    def name_process(
        _: object, __: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        return {"process": process, **event}

    structlog.configure(
        processors=[
            level,
            name_process,
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    logger: structlog.stdlib.BoundLogger = structlog.get_logger()
    return logger
