"""What is known of one request while it runs: who asks, under which id, and what it used.

The servers begin a record before anything else sees the request (`http_gate`, `grpc_gate`); the
shared code below both finds it by `current`, in whichever task of the request it runs. Its last
service is the line in the access log.
"""

import json
import time
import uuid
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field

import structlog

from core.errors import InvalidRequest
from core.messages import Explanation
from core.telemetry.trace import NO_TRACE, RequestTrace
from gateway.caller import ANONYMOUS, Caller
from gateway.ledger import Ledger
from gateway.limits import Allowance
from gateway.outcome import Outcome
from gateway.waterfall import Waterfall

_MAX_ID_CHARS = 128
_MAX_PATH_CHARS = 128


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One request. `request_id` is the client's label where it gave one, and finds no request."""

    request_id: str = field(default_factory=lambda: f"req-{uuid.uuid4().hex}")
    method: str = ""
    path: str = ""
    caller: Caller = ANONYMOUS
    # Whether the deadline is the client's own.
    own_deadline: bool = False
    # What was left of the quotas that bound the request, once it was admitted.
    allowances: tuple[Allowance, ...] = ()
    # Of an answer that is generated: `telemetry.names.Operation`.
    operation: str = ""
    model: str | None = None
    # The name of the job in the cluster's logs.
    job: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int = 0
    completion_tokens: int | None = None
    # Answers that were asked for to the one prompt, and how each that ended did.
    num_choices: int = 1
    finish_reasons: tuple[str, ...] = ()
    # None where it was refused before its work began.
    outcome: Outcome | None = None
    ttft_s: float | None = None
    # Whether the client wants to know why its request went where it did; and why that was.
    explain: bool = False
    explanation: Explanation | None = None
    started_s: float = field(default_factory=time.monotonic)
    # Of an answer that is generated; nobody traces the other calls.
    trace: RequestTrace = NO_TRACE
    waterfall: Waterfall = field(default_factory=Waterfall)

    def ledger(self) -> Ledger:
        """A ledger that begins with the request's arrival."""
        return Ledger(self.started_s, trace=self.trace, waterfall=self.waterfall)

    def log(self, status: int | str, *, quiet: bool = False) -> None:
        """Writes the access-log line. Nothing in it comes from a prompt or an answer."""
        logger = structlog.get_logger()
        caller = self.caller
        told = {
            "key": caller.key_id,
            "tenant": caller.tenant or None,
            "model": self.model,
            "job": self.job,
            "trace_id": self.trace.trace_id,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "ttft_s": None if self.ttft_s is None else round(self.ttft_s, 6),
        }
        (logger.debug if quiet else logger.info)(
            "request",
            method=self.method,
            path=loggable(self.path),
            status=status,
            duration_s=round(time.monotonic() - self.started_s, 6),
            request_id=self.request_id,
            **{name: value for name, value in told.items() if value is not None},
        )


_CURRENT: ContextVar[RequestRecord | None] = ContextVar("request_record", default=None)


def begin(record: RequestRecord) -> None:
    """Makes it the record of this task, and of the tasks that it starts."""
    _CURRENT.set(record)


def current() -> RequestRecord:
    """The record of the request that this task serves; an anonymous one outside of any."""
    return _CURRENT.get() or RequestRecord()


def checked_id(label: str) -> str:
    """A client's own request id. Raises InvalidRequest where it is not fit to be echoed."""
    if not (0 < len(label) <= _MAX_ID_CHARS and label.isascii() and label.isprintable()):
        raise InvalidRequest(
            f"must be 1 to {_MAX_ID_CHARS} printable ASCII characters", field="X-Request-Id"
        )
    return label


def explained(record: RequestRecord) -> str | None:
    """The explanation as one line of JSON, where it was asked for and there is one."""
    if not record.explain or record.explanation is None:
        return None
    return json.dumps(asdict(record.explanation), separators=(",", ":"))


def loggable(path: str) -> str:
    """A client's path as it may stand in a log: bounded, printable, without its query."""
    clipped = path.partition("?")[0][:_MAX_PATH_CHARS]
    return clipped if clipped.isascii() and clipped.isprintable() else ascii(clipped)[1:-1]
