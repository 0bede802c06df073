"""The gateway's streams to decode workers: one per life of a worker, shared by its requests."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from core import rpc
from core.errors import SlowReader, WorkerLost, to_failure
from core.messages import (
    AttachHello,
    AttachWelcome,
    Cancel,
    Ended,
    Endpoint,
    KeepTrace,
    Start,
    StepOutput,
    StopReason,
    Tokens,
    TransferId,
    WorkerRef,
)
from core.stream import StreamLink
from protos.tandem.internal.v1 import decode_pb2, decode_pb2_grpc


class DecodeStream:
    """What one worker says of one transfer, until it is read: at most `max_unread_tokens`."""

    def __init__(self, max_unread_tokens: int) -> None:
        self._room = self._max_unread_tokens = max_unread_tokens
        self._tokens: list[Tokens] = []
        self._ended: Ended | None = None
        self._news = asyncio.Event()

    def put(self, message: Tokens | Ended) -> bool:
        """Adds what the worker said; the first end counts.

        False where it does not fit. Then the stream ends there with SlowReader: its reader waits
        for a client that reads too little.
        """
        fits = isinstance(message, Ended) or len(message.token_ids) <= self._room
        if not fits:
            slow = SlowReader(
                f"the client left {self._max_unread_tokens} tokens unread while more came"
            )
            failure = to_failure(slow)
            message = Ended(transfer=message.transfer, reason=StopReason.ERROR, failure=failure)
        if self._ended is None:
            if isinstance(message, Ended):
                self._ended = message
            else:
                self._tokens.append(message)
                self._room -= len(message.token_ids)
            self._news.set()
        return fits

    async def next(self) -> tuple[tuple[Tokens, ...], Ended | None]:
        """All that came since the last call; waits for something. The caller sets the deadline."""
        await self._news.wait()
        self._news.clear()
        tokens, self._tokens = tuple(self._tokens), []
        self._room = self._max_unread_tokens
        return tokens, self._ended


class DecodeLink:
    """One stream to one life of one decode worker. `on_ended` hears of each transfer's end."""

    def __init__(
        self,
        endpoint: Endpoint,
        me: WorkerRef,
        *,
        max_unread_tokens: int,
        on_ended: Callable[[TransferId], None],
        on_down: Callable[["DecodeLink"], None],
        dial: rpc.Dial = rpc.channel,
    ) -> None:
        self.endpoint = endpoint
        self._max_unread_tokens = max_unread_tokens
        self._on_ended = on_ended
        self._on_down = on_down
        self._streams: dict[TransferId, DecodeStream] = {}
        self._me = me
        self._up = True
        self._opened = False
        # What is sent before the stream is open goes with the hello.
        self._early: list[Start | Cancel | KeepTrace] = []
        self._link = StreamLink(
            endpoint.address,
            _open,
            decode_pb2.AttachRequest,
            hello=self._hello,
            on_message=self._received,
            on_down=self._lost,
            dial=dial,
        )

    async def run(self) -> None:
        """Until the stream is lost."""
        await self._link.run_once()

    def start(self, start: Start) -> DecodeStream:
        """Gives the request to the worker."""
        room = self._max_unread_tokens * len(start.branches)
        stream = self._streams[start.transfer] = DecodeStream(room)
        if not self._up:
            self._end(start.transfer, self._loss())
        else:
            self._say(start)
        return stream

    def cancel(
        self, transfer: TransferId, reason: StopReason, choices: tuple[int, ...] = ()
    ) -> None:
        """Ends the request early, or only these of its answers; idempotent.

        The worker's answer to the end of the whole frees the placement.
        """
        if transfer in self._streams and self._up:
            self._say(Cancel(transfer=transfer, reason=reason, choices=choices))

    def keep_trace(self, request_id: str) -> None:
        """The worker is to export what it has recorded of this request, also after its end."""
        if self._up:
            self._say(KeepTrace(request_id=request_id))

    def _say(self, message: Start | Cancel | KeepTrace) -> None:
        if self._opened:
            if not self._link.send(message) and isinstance(message, Start):
                self._end(message.transfer, self._loss())  # it reads nothing: as good as lost
        else:
            self._early.append(message)

    def _hello(self) -> list[AttachHello | Start | Cancel | KeepTrace]:
        self._opened = True
        return [AttachHello(gateway=self._me), *self._early]

    def _received(self, message: Any) -> None:
        if isinstance(message, AttachWelcome):
            # Another life answers at this address: its own check of each Start refuses ours.
            return
        if isinstance(message, StepOutput):
            for tokens in message.tokens:
                stream = self._streams.get(tokens.transfer)
                if stream is not None and not stream.put(tokens):
                    self.cancel(tokens.transfer, StopReason.CANCELLED)
            for ended in message.ended:
                self._end(ended.transfer, ended)

    def _lost(self) -> None:
        self._up = False
        for transfer in list(self._streams):
            self._end(transfer, self._loss())
        self._on_down(self)

    def _loss(self) -> WorkerLost:
        worker = self.endpoint.worker
        return WorkerLost(f"decode worker {worker} is lost", culprit=worker)

    def _end(self, transfer: TransferId, end: Ended | WorkerLost) -> None:
        stream = self._streams.pop(transfer, None)
        if stream is None:
            return
        if isinstance(end, WorkerLost):
            end = Ended(transfer=transfer, reason=StopReason.ERROR, failure=to_failure(end))
        stream.put(end)
        self._on_ended(transfer)


class DecodeLinks:
    """Gives the link to a life of a worker, opening it where there is none that is up."""

    def __init__(
        self,
        me: WorkerRef,
        tasks: asyncio.TaskGroup,
        *,
        on_ended: Callable[[TransferId], None],
        max_unread_tokens: int,
        dial: rpc.Dial = rpc.channel,
    ) -> None:
        self._max_unread_tokens = max_unread_tokens
        self._me = me
        self._dial = dial
        self._tasks = tasks
        self._on_ended = on_ended
        self._links: dict[WorkerRef, DecodeLink] = {}
        self._running: set[asyncio.Task[None]] = set()

    def get(self, endpoint: Endpoint) -> DecodeLink:
        """The link to this worker."""
        link = self._links.get(endpoint.worker)
        if link is None:
            link = DecodeLink(
                endpoint,
                self._me,
                max_unread_tokens=self._max_unread_tokens,
                on_ended=self._on_ended,
                on_down=self._down,
                dial=self._dial,
            )
            self._links[endpoint.worker] = link
            task = self._tasks.create_task(link.run())
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        return link

    def close(self) -> None:
        """Ends every stream."""
        for task in self._running:
            task.cancel()

    def _down(self, link: DecodeLink) -> None:
        if self._links.get(link.endpoint.worker) is link:
            del self._links[link.endpoint.worker]


def _open(channel: grpc.aio.Channel) -> object:
    return decode_pb2_grpc.DecodeServiceStub(channel).Attach
