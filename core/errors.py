"""The error tree, and the one table from an error to its HTTP and gRPC status.

TandemError
├── InvalidRequest        the client's fault; names the field
│   ├── ContextTooLong
│   ├── BodyTooLarge
│   ├── InvalidGrammar    a schema, regular expression or grammar that cannot hold an answer
│   └── Unsupported       a documented field that is not served
├── ModelNotFound
├── RequestNotFound       nothing to cancel
├── Unauthenticated       no key, or none that is known here
├── RateLimited           the caller's quota is used up; says when to come back
├── Overloaded            no room now; says when to come back
├── Unavailable           no worker takes it now
│   ├── WorkerLost        the worker died, froze or restarted with the request in it
│   ├── Moved             the worker turns or leaves, and the request goes on elsewhere
│   ├── StaleLeader       a scheduler placed it that leads no more
│   └── StoreAway         what several processes share does not answer
├── DeadlineExceeded
├── Cancelled
├── SlowReader            the client does not take what it asked for
├── DataLoss              KV blocks arrived that are not those that were sent
├── Forbidden             no valid ticket
├── Incompatible          two workers that cannot share KV blocks
├── ConfigError           what an operator wrote is wrong; ends the process with one line
└── Internal
"""

from dataclasses import dataclass
from typing import ClassVar

import grpc

from core.messages import Failure, WorkerRef


class TandemError(Exception):
    """Something went wrong that has a name; `message` is fit for a client's eyes."""

    code: ClassVar[str] = "internal"

    def __init__(self, message: str, *, culprit: WorkerRef | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.culprit = culprit


class InvalidRequest(TandemError):
    """A request that can never succeed. `field` is its path, such as `messages[0].content`."""

    code = "invalid_request"

    def __init__(
        self, message: str, *, field: str | None = None, culprit: WorkerRef | None = None
    ) -> None:
        super().__init__(message, culprit=culprit)
        self.field = field


class ContextTooLong(InvalidRequest):
    """Prompt and requested output do not fit the model's window."""

    code = "context_length_exceeded"


class BodyTooLarge(InvalidRequest):
    """The request is larger than the gateway reads."""

    code = "request_too_large"


class InvalidGrammar(InvalidRequest):
    """No answer can be held to this. The message may quote the grammar: for its client alone."""

    code = "invalid_grammar"


class Unsupported(InvalidRequest):
    """A field of the API that this server does not serve, refused rather than ignored."""

    code = "unsupported"


class ModelNotFound(TandemError):
    """No model of that name is served."""

    code = "model_not_found"


class Unauthenticated(TandemError):
    """The request brings no API key, or one that opens nothing."""

    code = "invalid_api_key"


class RateLimited(TandemError):
    """The caller has used up a quota: `quota` names whose, `resource` what it counts.

    `retry_after_s` is None where waiting does not help: the request alone is above the quota.
    """

    code = "rate_limit_exceeded"

    def __init__(
        self,
        message: str,
        *,
        quota: str = "",
        resource: str = "requests",
        retry_after_s: float | None = 1.0,
        culprit: WorkerRef | None = None,
    ) -> None:
        super().__init__(message, culprit=culprit)
        self.quota = quota
        self.resource = resource
        self.retry_after_s = retry_after_s


class RequestNotFound(TandemError):
    """The caller has no running request of that id."""

    code = "request_not_found"


class Overloaded(TandemError):
    """The cluster has no room for the request now."""

    code = "overloaded"

    def __init__(
        self, message: str, *, retry_after_s: float = 1.0, culprit: WorkerRef | None = None
    ) -> None:
        super().__init__(message, culprit=culprit)
        self.retry_after_s = retry_after_s


class Unavailable(TandemError):
    """A process that the request needs cannot be reached, or was lost."""

    code = "unavailable"


class WorkerLost(Unavailable):
    """A worker died, froze or restarted while it held the request."""

    code = "worker_lost"


class Moved(Unavailable):
    """A worker that turns to another role, or leaves, gives the request up. It lost nothing."""

    code = "moved"


class StaleLeader(Unavailable):
    """A command of a scheduler after which another one leads."""

    code = "stale_leader"


class StoreAway(Unavailable):
    """The store that several processes share does not answer, or refuses."""

    code = "store_away"


class Forbidden(TandemError):
    """A message without a valid ticket: its sender may not ask for this."""

    code = "forbidden"


class DeadlineExceeded(TandemError):
    """The request's time ran out."""

    code = "deadline_exceeded"


class Cancelled(TandemError):
    """The client left."""

    code = "cancelled"


class SlowReader(TandemError):
    """The client reads so much slower than the answer comes that its buffer is full."""

    code = "slow_reader"


class DataLoss(TandemError):
    """A KV block's digest is not that of the block that was sent."""

    code = "data_loss"


class Incompatible(TandemError):
    """Two workers whose KV blocks do not mean the same."""

    code = "incompatible"


class ConfigError(TandemError):
    """A setting, a file or a port that an operator must mend."""

    code = "config"


class Internal(TandemError):
    """A fault of this software."""

    code = "internal"


@dataclass(frozen=True, slots=True)
class Status:
    """How an error is told: the HTTP status, OpenAI's error type, and the gRPC status."""

    http: int
    openai_type: str
    grpc: grpc.StatusCode


STATUS: dict[type[TandemError], Status] = {
    InvalidRequest: Status(400, "invalid_request_error", grpc.StatusCode.INVALID_ARGUMENT),
    ContextTooLong: Status(400, "invalid_request_error", grpc.StatusCode.INVALID_ARGUMENT),
    BodyTooLarge: Status(413, "invalid_request_error", grpc.StatusCode.INVALID_ARGUMENT),
    InvalidGrammar: Status(400, "invalid_request_error", grpc.StatusCode.INVALID_ARGUMENT),
    Unsupported: Status(400, "invalid_request_error", grpc.StatusCode.INVALID_ARGUMENT),
    ModelNotFound: Status(404, "invalid_request_error", grpc.StatusCode.NOT_FOUND),
    Unauthenticated: Status(401, "invalid_request_error", grpc.StatusCode.UNAUTHENTICATED),
    RateLimited: Status(429, "rate_limit_error", grpc.StatusCode.RESOURCE_EXHAUSTED),
    RequestNotFound: Status(404, "invalid_request_error", grpc.StatusCode.NOT_FOUND),
    Overloaded: Status(503, "overloaded_error", grpc.StatusCode.RESOURCE_EXHAUSTED),
    Unavailable: Status(503, "service_unavailable", grpc.StatusCode.UNAVAILABLE),
    WorkerLost: Status(503, "service_unavailable", grpc.StatusCode.UNAVAILABLE),
    Moved: Status(503, "service_unavailable", grpc.StatusCode.UNAVAILABLE),
    StaleLeader: Status(503, "service_unavailable", grpc.StatusCode.UNAVAILABLE),
    StoreAway: Status(503, "service_unavailable", grpc.StatusCode.UNAVAILABLE),
    Forbidden: Status(500, "server_error", grpc.StatusCode.INTERNAL),
    DeadlineExceeded: Status(504, "timeout_error", grpc.StatusCode.DEADLINE_EXCEEDED),
    Cancelled: Status(499, "cancelled", grpc.StatusCode.CANCELLED),
    SlowReader: Status(408, "timeout_error", grpc.StatusCode.RESOURCE_EXHAUSTED),
    DataLoss: Status(500, "server_error", grpc.StatusCode.DATA_LOSS),
    Incompatible: Status(503, "service_unavailable", grpc.StatusCode.FAILED_PRECONDITION),
    ConfigError: Status(500, "server_error", grpc.StatusCode.FAILED_PRECONDITION),
    Internal: Status(500, "server_error", grpc.StatusCode.INTERNAL),
}

_BY_CODE = {kind.code: kind for kind in STATUS}


def status_of(error: BaseException) -> Status:
    """The status of an error; anything without a name is an internal one."""
    for kind in type(error).__mro__:
        if kind in STATUS:
            return STATUS[kind]
    return STATUS[Internal]


def to_failure(error: BaseException) -> Failure:
    """The error as it travels. What has no name travels without its text: it may quote a prompt."""
    if isinstance(error, TandemError):
        return Failure(code=error.code, message=error.message, culprit=error.culprit)
    return Failure(code=Internal.code, message=f"internal error ({type(error).__name__})")


def from_failure(failure: Failure) -> TandemError:
    """The exception that a failure on the wire stands for."""
    return _BY_CODE.get(failure.code, Internal)(failure.message, culprit=failure.culprit)
