"""Long-lived bidirectional streams between the processes of a cluster.

Every hot path of the system is one of these: messages of all requests share it, so that the cost
per message is paid once per engine step and peer, not once per token. `Outbox` is the sending half
of either end, `serve_stream` the serving end, `StreamLink` the calling end.

Both ends say a heartbeat every second, from the event loop and not from the compute thread. A peer
that is dead closes its connection; one that is frozen does not, and is taken for lost after four
seconds of silence. All requests of a pair share the one stream, so this is their lease on each
other, renewed for all of them at once.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, Generic, Protocol, TypeVar

import grpc
import structlog
from google.protobuf.message import Message

from core import rpc
from core.codec import carries_more, unwrap_all, wrap
from core.messages import Heartbeat

HEARTBEAT_S = 1.0
SILENT_BEATS = 4
_BACKOFF_FIRST_S = 0.05
_BACKOFF_LAST_S = 1.0
# Messages that leave together where they are ready together: one costs gRPC what fifty do.
_MOST_TOGETHER = 64

_HEARTBEAT = Heartbeat()

M = TypeVar("M", bound=Message)


class Outbox(Generic[M]):
    """Messages that wait to go down one stream: filled by `send`, drained by gRPC.

    Bounded: a peer that does not read makes `send` return False, and its owner drops the stream.
    Where the stream's message has a field `more`, what is ready together leaves in one message.
    """

    def __init__(self, pb_class: type[M], *, capacity: int = 65536) -> None:
        self._pb_class = pb_class
        self._capacity = capacity
        self._queue: asyncio.Queue[M | None] = asyncio.Queue()
        self._closed = False

    def send(self, obj: Any) -> bool:
        """Queues a message of the stream's oneof; False where the stream is closed or clogged."""
        if self._closed or self._queue.qsize() >= self._capacity:
            return False
        self._queue.put_nowait(wrap(self._pb_class, obj))
        return True

    def close(self) -> None:
        """Ends the stream after what is queued. Idempotent."""
        if not self._closed:
            self._closed = True
            self._queue.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[M]:
        most = _MOST_TOGETHER if carries_more(self._pb_class) else 1
        while (message := await self._queue.get()) is not None:
            ended = False
            together: Any = message
            for _ in range(min(most - 1, self._queue.qsize())):
                if (another := self._queue.get_nowait()) is None:
                    ended = True
                    break
                together.more.append(another)
            yield message
            if ended:
                return


class Pulse:
    """One end's heartbeat, and its ear for the other's.

    Counts its own beats, not seconds: where this very process was frozen or starved, no time has
    passed for the peer to be silent in.
    """

    def __init__(self, outbox: Outbox[Any], on_silent: Callable[[], object]) -> None:
        self._outbox = outbox
        self._on_silent = on_silent
        self._beats = 0
        self.silent = False

    def heard(self) -> None:
        """Anything came from the peer."""
        self._beats = 0

    async def run(self) -> None:
        """Beats until cancelled, or until the peer has been silent for too long."""
        while self._beats < SILENT_BEATS:
            await asyncio.sleep(HEARTBEAT_S)
            self._outbox.send(_HEARTBEAT)
            self._beats += 1
        self.silent = True
        self._on_silent()


async def serve_stream(
    requests: AsyncIterator[Message], outbox: Outbox[M], handle: Callable[[Any], None]
) -> AsyncIterator[M]:
    """The body of a stream-stream method: hands each request to `handle`, yields what is sent.

    Ends when either side does, or the peer is silent. An exception in `handle` ends the stream and
    is raised here.
    """
    pulse = Pulse(outbox, outbox.close)

    async def read() -> None:
        try:
            async for request in requests:
                pulse.heard()
                for message in unwrap_all(request):
                    if message != _HEARTBEAT:
                        handle(message)
        finally:
            outbox.close()

    reader = asyncio.create_task(read())
    beating = asyncio.create_task(pulse.run())
    try:
        async for reply in outbox:
            yield reply
        if reader.done():  # the peer ended the stream, or `handle` failed; else we did
            await reader
    finally:
        outbox.close()
        for task in (reader, beating):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, grpc.RpcError):
                await task


class OpenCall(Protocol):
    """Starts the stream on a channel: `lambda channel: Stub(channel).Method`."""

    def __call__(self, channel: grpc.aio.Channel) -> Any: ...


class StreamLink:
    """The calling end of one stream to one peer.

    `address` may be asked anew for each stream. `hello` gives what is said first on each.
    `on_message` gets each reply; `on_down` is called when the stream is lost, before anything is
    sent on the next one.
    """

    def __init__(
        self,
        address: str | Callable[[], str],
        open_call: OpenCall,
        pb_class: type[Message],
        *,
        hello: Callable[[], list[Any]],
        on_message: Callable[[Any], None],
        on_down: Callable[[], None],
        longest_pause_s: float = _BACKOFF_LAST_S,
        dial: rpc.Dial = rpc.channel,
    ) -> None:
        self._address = address
        self._dial = dial
        self._longest_pause_s = longest_pause_s
        self._cut: Callable[[], object] = lambda: None
        self._dropped = False
        self._open_call = open_call
        self._pb_class = pb_class
        self._hello = hello
        self._on_message = on_message
        self._on_down = on_down
        self._outbox: Outbox[Message] | None = None
        # Whom the last stream was opened to, and why that did not become our peer.
        self._called = ""
        self._refusal: str | None = None

    def send(self, obj: Any) -> bool:
        """Sends if the stream is up. False means that the peer will not get this message."""
        return self._outbox is not None and self._outbox.send(obj)

    def drop(self) -> None:
        """Ends the present stream as though it were lost; nothing where none is up."""
        if self._outbox is not None:
            self._dropped = True
            self._cut()

    async def run_once(self) -> None:
        """Opens the stream and serves it until it is lost. Never raises for a peer's failure."""
        self._dropped = False
        self._refusal = None
        outbox = self._outbox = Outbox(self._pb_class)
        for message in self._hello():
            outbox.send(message)
        self._called = self._address if isinstance(self._address, str) else self._address()
        channel = self._dial(self._called)
        call = self._open_call(channel)(aiter(outbox))
        self._cut = call.cancel
        pulse = Pulse(outbox, call.cancel)
        beating = asyncio.create_task(pulse.run())
        try:
            async for reply in call:
                pulse.heard()
                for message in unwrap_all(reply):
                    if message != _HEARTBEAT:
                        self._on_message(message)
        except grpc.RpcError as error:
            self._refusal = rpc.refusal(error)
        except asyncio.CancelledError:
            if not (pulse.silent or self._dropped):  # not the call that we cancelled, but ourselves
                raise
        finally:
            beating.cancel()
            self._outbox = None
            outbox.close()
            self._on_down()
            await channel.close()

    async def keep_up(self) -> None:
        """Opens the stream again and again, with a growing pause, until cancelled.

        Where the peer's certificate, or ours, will not do, the log says so, once.
        """
        loop = asyncio.get_running_loop()
        pause_s = _BACKOFF_FIRST_S
        seen: str | None = None
        told: str | None = None
        while True:
            began_s = loop.time()
            await self.run_once()
            lasted_s = loop.time() - began_s
            if self._refusal is None:
                seen, told = (None, None) if lasted_s > 1 else (seen, told)
            elif self._refusal == seen != told:  # the second time: who dies meanwhile hangs up, too
                log = structlog.get_logger()
                log.error("not_connected", address=self._called, why=self._refusal)
                told = seen
            else:
                seen = self._refusal
            pause_s = _BACKOFF_FIRST_S if lasted_s > 1 else min(2 * pause_s, self._longest_pause_s)
            await asyncio.sleep(pause_s)
