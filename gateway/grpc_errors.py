"""Errors as gRPC clients expect them: a status code, and google.rpc details that programs read."""

from collections.abc import Iterator

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from core.errors import InvalidRequest, Overloaded, RateLimited, status_of, to_failure
from gateway.http_errors import error_text

DOMAIN = "tandem"
_DETAILS_KEY = "grpc-status-details-bin"
# Metadata behind every answer, that of errors included.
REQUEST_ID = "x-request-id"


def rich_status(error: BaseException, request_id: str) -> status_pb2.Status:
    """The error as google.rpc.Status.

    ErrorInfo (reason: the error's code in upper case) and RequestInfo always; BadRequest with the
    field where the request is to blame; QuotaFailure where a quota is used up; RetryInfo where it
    is worth coming back.
    """
    message = error_text(error) if isinstance(error, InvalidRequest) else to_failure(error).message
    code: int = status_of(error).grpc.value[0]
    details = map(_packed, _details(error, request_id))
    return status_pb2.Status(code=code, message=message, details=details)


async def abort(
    context: "grpc.aio.ServicerContext[object, object]",
    error: BaseException,
    request_id: str,
    code: grpc.StatusCode | None = None,
) -> None:
    """Ends the call with the error, under a code of its own where one is given."""
    status = rich_status(error, request_id)
    code = code or status_of(error).grpc
    status.code = code.value[0]
    await context.abort(code, status.message, (*trailers(status), (REQUEST_ID, request_id)))


def trailers(status: status_pb2.Status) -> tuple[tuple[str, bytes], ...]:
    """The metadata that carries the details."""
    return ((_DETAILS_KEY, status.SerializeToString()),)


def _details(error: BaseException, request_id: str) -> Iterator[Message]:
    reason = to_failure(error).code.upper()
    metadata: dict[str, str] = {"http_status": str(status_of(error).http)}
    after_s: float | None = None
    if isinstance(error, Overloaded | RateLimited):
        after_s = error.retry_after_s
    if after_s is not None:
        metadata["retry_after_s"] = f"{after_s:.3f}"
    if isinstance(error, InvalidRequest) and error.field:
        metadata["field"] = error.field
    yield error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata=metadata)
    yield error_details_pb2.RequestInfo(request_id=request_id)
    if isinstance(error, InvalidRequest):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field or "", description=error.message, reason=reason
        )
        yield error_details_pb2.BadRequest(field_violations=[violation])
    if isinstance(error, RateLimited):
        exceeded = error_details_pb2.QuotaFailure.Violation(
            subject=error.quota, description=error.message, quota_metric=error.resource
        )
        yield error_details_pb2.QuotaFailure(violations=[exceeded])
    if after_s is not None:
        nanos = round(after_s * 1e9)
        delay = Duration(seconds=nanos // 10**9, nanos=nanos % 10**9)
        yield error_details_pb2.RetryInfo(retry_delay=delay)


def _packed(message: Message) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(message)
    return packed
