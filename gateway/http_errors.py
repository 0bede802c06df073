"""Errors as HTTP clients of the OpenAI API expect them, and never with what the client sent."""

import json
import math
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from core.errors import InvalidRequest, ModelNotFound, RateLimited, status_of, to_failure

_DEFAULT_RETRY_AFTER_S = 1.0


class HttpRefusal(Exception):
    """A refusal that only HTTP knows: a route, a method, a content type, a body that comes late."""

    def __init__(
        self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.headers = headers or {}


def http_status(error: BaseException) -> int:
    """The status code that an error is answered with."""
    return error.status if isinstance(error, HttpRefusal) else status_of(error).http


def error_body(error: BaseException) -> dict[str, Any]:
    """`{"error": {message, type, param, code}}`, in plain response and stream alike."""
    param = None
    if isinstance(error, HttpRefusal):
        message, kind, code = error.message, "invalid_request_error", error.code
    else:
        failure = to_failure(error)
        message, kind, code = failure.message, status_of(error).openai_type, failure.code
        if isinstance(error, InvalidRequest):
            param = error.field
            message = error_text(error)
        elif isinstance(error, ModelNotFound):
            param = "model"
        elif isinstance(error, RateLimited):
            kind = error.resource
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_text(error: InvalidRequest) -> str:
    """The message, led by the field that it speaks of."""
    return f"{error.field}: {error.message}" if error.field else error.message


def error_response(error: BaseException, headers: Mapping[str, str] | None = None) -> Response:
    """The whole answer to a request that failed before its first byte."""
    status = http_status(error)
    extra = dict(headers or {})
    if isinstance(error, HttpRefusal):
        extra |= error.headers
    if status in (429, 503):
        after_s = getattr(error, "retry_after_s", _DEFAULT_RETRY_AFTER_S)
        if after_s is None:
            extra["x-should-retry"] = "false"  # OpenAI's clients would, whatever the status means
        else:
            extra["retry-after"] = str(max(1, math.ceil(after_s)))
    if status == 401:
        extra["www-authenticate"] = "Bearer"
    if status in (408, 413):  # the rest of the body is not read
        extra["connection"] = "close"
    return json_response(error_body(error), status=status, headers=extra)


def json_response(
    body: Mapping[str, Any], *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """UTF-8 JSON; NaN can never be in it."""
    content = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Response(content, status, dict(headers or {}), media_type="application/json")
