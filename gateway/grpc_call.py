"""What every public gRPC call has in common: its errors, its pace, its end."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from core.errors import InvalidRequest, SlowReader
from gateway.failure_log import log_failure
from gateway.grpc_errors import REQUEST_ID, abort
from gateway.grpc_parse import parser
from gateway.request_record import current
from gateway.time_limit import TimeLimit

Context = grpc.aio.ServicerContext[Any, Any]
M = TypeVar("M", bound=Message)
# What takes one event of an answer to the client.
Write = Callable[[Message], Awaitable[None]]
# A client that takes nothing for this long is not waited for.
WRITE_TIMEOUT_S = 30.0


def unary(
    answer: Callable[[M, Context], Awaitable[Message]], asks: type[M], max_bytes: int
) -> "grpc.RpcMethodHandler[Any, Any]":
    """The handler of a call with one answer. Whatever is raised ends it with a rich status."""

    async def call(request: M | InvalidRequest, context: Context) -> Message:
        try:
            return await answer(_parsed(request), context)
        except Exception as error:
            await fail(context, error)
            raise

    return grpc.unary_unary_rpc_method_handler(call, parser(asks, max_bytes), _serialised)


def streamed(
    answer: Callable[[M, Context, Write], Awaitable[None]], asks: type[M], max_bytes: int
) -> "grpc.RpcMethodHandler[Any, Any]":
    """The handler of a call with many answers. It waits for a client that is slow, not forever.

    What a slow client has not read is with gRPC, bounded by the connection's flow control, and in
    the backend's buffer, bounded by `gateway.max_unread_tokens`.
    """

    async def call(request: M | InvalidRequest, context: Context) -> None:
        limit = TimeLimit()
        begun = False

        async def write(response: Message) -> None:
            nonlocal begun
            if not begun:
                begun = True
                # Not sooner: a call that has had its initial metadata is never tried again by
                # a client's own retry policy.
                await context.send_initial_metadata(((REQUEST_ID, current().request_id),))
            # Streams whose tokens came with one step write one after another from here, and gRPC
            # sends what is written in a row together: a sixth of what a token costs.
            await asyncio.sleep(0)
            try:
                with limit.within(WRITE_TIMEOUT_S):
                    await context.write(response)
            except TimeoutError:
                raise SlowReader("the client took nothing for too long") from None

        try:
            await answer(_parsed(request), context, write)
        except Exception as error:
            await fail(context, error)
        finally:
            limit.close()

    return grpc.unary_stream_rpc_method_handler(call, parser(asks, max_bytes), _serialised)


def _parsed(request: M | InvalidRequest) -> M:
    """Raises what `gateway.grpc_parse` found wrong."""
    if isinstance(request, InvalidRequest):
        raise request
    return request


def _serialised(answer: Message) -> bytes:
    return answer.SerializeToString()


async def fail(context: Context, error: Exception, code: grpc.StatusCode | None = None) -> None:
    """Ends the call with the error's status, or another, as soon as the client takes it."""
    log_failure(error)
    # The status queues behind what was written. A client that reads neither is left to its
    # connection's end; the job has ended, and nothing waits here.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await abort(context, error, current().request_id, code)
