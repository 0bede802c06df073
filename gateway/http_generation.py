"""Writes one generation to one HTTP connection, and ends it when the client leaves."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.choice_text import TextEvent
from gateway.failure_log import log_failure
from gateway.http_errors import error_body, error_response, json_response
from gateway.openai_answers import Answer
from gateway.sse import DONE, SlowClient, SseWriter, sse_event
from gateway.text_stream import DoneEvent, TextStream

T = TypeVar("T")
Opened = AbstractAsyncContextManager[TextStream]
# Log probabilities of a longer prompt are put into words on a thread: a thousand take 25 ms.
_INLINE_LOGPROBS = 256
MakeAnswer = Callable[[TextStream], Answer]


class WholeAnswer(Response):
    """The answer in one piece."""

    def __init__(self, opened: Opened, answer: MakeAnswer, headers: Mapping[str, str]) -> None:
        super().__init__()
        self._opened = opened
        self._answer = answer
        self._extra = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await while_connected(receive, self._generate())
        if response is not None:
            await response(scope, receive, send)

    async def _generate(self) -> Response:
        try:
            async with self._opened as stream:
                answer = self._answer(stream)
                events: list[TextEvent] = []
                async for event in stream:
                    if isinstance(event, DoneEvent):
                        make = partial(answer.whole, events, event)
                        body = await _beside(make, any(map(_is_large, events)))
                        return json_response(body, headers=self._extra)
                    events.append(event)
            raise AssertionError("a text stream ends with DoneEvent")
        except Exception as error:
            return _refused(error, self._extra)


class StreamedAnswer(Response):
    """The answer as server-sent events.

    The response's head waits for the first event, so that a refusal is a plain HTTP error, but no
    longer than one keepalive interval: a proxy would take a longer silence for a dead server. An
    error after the head is an event of its own, and no [DONE] follows it.
    """

    def __init__(
        self, opened: Opened, answer: MakeAnswer, headers: Mapping[str, str], *, keepalive_s: float
    ) -> None:
        super().__init__()
        self._opened = opened
        self._answer = answer
        self._extra = headers
        self._keepalive_s = keepalive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = SseWriter(send, self._extra, keepalive_s=self._keepalive_s)
        error = await while_connected(receive, self._generate(writer))
        if error is not None:
            await _refused(error, self._extra)(scope, receive, send)

    async def _generate(self, writer: SseWriter) -> Exception | None:
        """Gives the error back that came before the response's head, if one did."""
        beside = asyncio.create_task(writer.keep_alive())
        try:
            async with self._opened as stream:
                await self._write(stream, writer)
            await writer.write(DONE)
            await writer.close()
        except SlowClient as error:  # whatever else we would write, it would not take
            log_failure(error)
        except Exception as error:
            await _wind_up(beside)
            if not writer.started:
                return error
            log_failure(error)
            body = error_body(error)
            body["error"]["request_id"] = self._extra.get("x-request-id")
            await writer.write(sse_event(body))
            await writer.close()
        finally:
            await _wind_up(beside)
            writer.release()
        return None

    async def _write(self, stream: TextStream, writer: SseWriter) -> None:
        answer, bookmark = self._answer(stream), stream.bookmark
        pending = [] if bookmark is not None and bookmark.resumes else answer.first()
        async for event in stream:
            if isinstance(event, DoneEvent):
                pending += answer.last(event)
            else:
                chunks = await _beside(partial(answer.chunks, event), _is_large(event))
                if bookmark is None or bookmark.is_news(event):
                    pending += chunks
            if pending:
                *others, last = pending
                named = sse_event(last, bookmark.event_id if bookmark is not None else None)
                await writer.write(b"".join([*map(sse_event, others), named]))
                pending = []


def _is_large(event: TextEvent) -> bool:
    return len(event.prompt_logprobs) > _INLINE_LOGPROBS


async def _beside(make: Callable[[], T], large: bool) -> T:
    """What `make` makes; where that takes long, the event loop goes on meanwhile."""
    return await asyncio.to_thread(make) if large else make()


async def while_connected(receive: Receive, work: Awaitable[T]) -> T | None:
    """Runs the work; None where the client left first, with the work cancelled and wound up.

    The request's body has been read, so the next message can only be the disconnect.
    """
    running = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait([running, leaving], return_when=asyncio.FIRST_COMPLETED)
        return running.result() if running.done() else None
    finally:
        await _wind_up(running, leaving)


async def _wind_up(*tasks: asyncio.Future[Any]) -> None:
    """Cancels what still runs and waits for its end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _refused(error: Exception, headers: Mapping[str, str]) -> Response:
    log_failure(error)
    return error_response(error, headers)
