"""A stretch of time that a request spent in one stage, written down by who spent it."""

import os
from collections.abc import Mapping

Value = str | int | float | bool | tuple[str, ...]
Attributes = Mapping[str, Value]
# An answer of many thousand tokens has more events than anybody reads.
MAX_EVENTS = 128


class Span:
    """Times are seconds of this process's monotonic clock. Changed by the event loop alone.

    `links` are (trace id, span id) of spans that this one has to do with, and is no child of.
    """

    __slots__ = (
        "attributes",
        "end_s",
        "error",
        "events",
        "is_server",
        "links",
        "name",
        "num_dropped_events",
        "parent_id",
        "span_id",
        "start_s",
    )

    def __init__(self, name: str, start_s: float, parent_id: bytes) -> None:
        self.name = name
        self.span_id = os.urandom(8)
        self.parent_id = parent_id
        self.start_s = start_s
        self.end_s: float | None = None
        self.is_server = False
        self.error: str | None = None
        self.attributes: dict[str, Value] = {}
        self.events: list[tuple[str, float, Attributes]] = []
        self.num_dropped_events = 0
        self.links: list[tuple[bytes, bytes]] = []

    def set(self, attributes: Mapping[str, Value | None]) -> None:
        """Says more of it; None is nothing to say."""
        for key, value in attributes.items():
            if value is not None:
                self.attributes[key] = value

    def event(self, name: str, at_s: float, attributes: Attributes) -> None:
        """Something happened within it. Past MAX_EVENTS it is only counted."""
        if len(self.events) < MAX_EVENTS:
            self.events.append((name, at_s, attributes))
        else:
            self.num_dropped_events += 1

    def fail(self, error: str) -> None:
        """It is a failure, of this kind. The first one counts."""
        self.error = self.error or error

    def end(self, at_s: float, error: str | None = None) -> None:
        """It is over. Idempotent: the first end counts."""
        if self.end_s is None:
            self.end_s = at_s
            if error is not None:
                self.fail(error)


class _NoSpan(Span):
    """Takes everything, keeps nothing: what a request has that nobody traces."""

    __slots__ = ()

    def set(self, attributes: Mapping[str, Value | None]) -> None: ...
    def event(self, name: str, at_s: float, attributes: Attributes) -> None: ...
    def fail(self, error: str) -> None: ...
    def end(self, at_s: float, error: str | None = None) -> None: ...


NO_SPAN: Span = _NoSpan("", 0.0, b"")
