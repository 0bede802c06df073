"""W3C Trace Context (https://www.w3.org/TR/trace-context-2/): which trace, under which span."""

import re
from dataclasses import dataclass

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_NO_TRACE_ID, _NO_SPAN_ID = bytes(16), bytes(8)
_SAMPLED = 1
HEADER = "traceparent"
# How a server tells its caller the trace that it made of the request.
RESPONSE_HEADER = "traceresponse"


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span as other processes name it. `trace_id` has 16 bytes, `span_id` 8."""

    trace_id: bytes
    span_id: bytes
    sampled: bool

    @classmethod
    def parse(cls, traceparent: str | None) -> "TraceContext | None":
        """None where there is none, or one that the specification has us ignore."""
        found = _TRACEPARENT.fullmatch(traceparent) if traceparent else None
        if found is None:
            return None
        version, trace_id, span_id = found[1], bytes.fromhex(found[2]), bytes.fromhex(found[3])
        if version == "ff" or (version == "00" and found[5] is not None):
            return None
        if trace_id == _NO_TRACE_ID or span_id == _NO_SPAN_ID:
            return None
        return cls(trace_id, span_id, bool(int(found[4], 16) & _SAMPLED))

    def __str__(self) -> str:
        return f"00-{self.trace_id.hex()}-{self.span_id.hex()}-{self.sampled:02x}"
