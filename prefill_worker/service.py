"""The prefill worker's gRPC service: one stream per decode worker."""

import asyncio
import collections
import functools
from collections.abc import AsyncIterator
from typing import Any

import grpc
import structlog

from core.errors import Incompatible, to_failure
from core.messages import (
    Adopted,
    CancelTransfer,
    Compatibility,
    HandoffHello,
    HandoffWelcome,
    KeepTrace,
    Prefill,
    WorkerRef,
)
from core.stream import Outbox, serve_stream
from core.tickets import Tickets
from kv_transfer.compatibility import check_compatible
from kv_transfer.reshaped import usable_offers
from kv_transfer.transport import connect
from prefill_worker.desk import PrefillDesk
from prefill_worker.peer import Peer
from protos.tandem.internal.v1 import prefill_pb2, prefill_pb2_grpc


class _Serving:
    """One stream; `ended` once its peer is closed, so that nothing of it is read or written."""

    def __init__(self, outbox: Outbox[prefill_pb2.HandoffResponse]) -> None:
        self.outbox = outbox
        self.ended = asyncio.Event()


class PrefillService(prefill_pb2_grpc.PrefillServiceServicer):
    """Serves the control side of the hand-off."""

    def __init__(
        self,
        desk: PrefillDesk,
        me: WorkerRef,
        compatibility: Compatibility,
        tickets: Tickets,
        faults: str,
    ) -> None:
        self._desk = desk
        self._me = me
        self._compatibility = compatibility
        self._log = structlog.get_logger()
        self._connect = functools.partial(connect, me=me, tickets=tickets, faults=faults)
        # The stream that serves each receiver, and the turn of the next one.
        self._serving: dict[WorkerRef, _Serving] = {}
        self._turns: collections.defaultdict[WorkerRef, asyncio.Lock] = collections.defaultdict(
            asyncio.Lock
        )

    async def Handoff(
        self,
        request_iterator: AsyncIterator[prefill_pb2.HandoffRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[prefill_pb2.HandoffResponse]:
        """One decode worker's stream: its hello, then its orders."""
        outbox = Outbox(prefill_pb2.HandoffResponse)
        peer: Peer | None = None
        pairing: asyncio.Task[None] | None = None

        serving = _Serving(outbox)

        async def pair(hello: HandoffHello) -> None:
            async with self._turns[hello.decode]:
                await pair_in_turn(hello)

        async def pair_in_turn(hello: HandoffHello) -> None:
            nonlocal peer
            try:
                check_compatible(self._compatibility, hello.compatibility)
                blocks, layout = self._desk.blocks_for(hello.ranks)
                offers = usable_offers(hello.offers, blocks)
                await self._end_older(hello.decode)
                sender = await asyncio.to_thread(self._connect, offers, peer=hello.decode)
            except Exception as error:
                if isinstance(error, Incompatible):
                    self._desk.incompatible = f"{hello.decode}: {error.message}"
                else:
                    self._log.error("pairing_failed", peer=str(hello.decode), exc_info=error)
                outbox.send(HandoffWelcome(prefill=self._me, failure=to_failure(error)))
                outbox.close()
                return
            peer = Peer(hello.decode, outbox, sender, blocks, layout)
            self._serving[peer.ref] = serving
            self._desk.peer_joined(peer)
            outbox.send(HandoffWelcome(prefill=self._me, transport=sender.name))

        def handle(message: Any) -> None:
            nonlocal pairing
            match message:
                case HandoffHello() if pairing is None:
                    pairing = asyncio.create_task(pair(message))
                case Prefill() if peer is not None:
                    self._desk.prefill(message, peer)
                case CancelTransfer() if peer is not None:
                    self._desk.cancel(message.transfer, peer)
                case KeepTrace() if peer is not None:
                    self._desk.keep_trace(message.request_id)
                case Adopted() if peer is not None:
                    self._desk.adopted(message.transfer)
                case _:
                    raise ValueError("a hand-off stream begins with one hello and its welcome")

        try:
            async for reply in serve_stream(request_iterator, outbox, handle):
                yield reply
        finally:
            if pairing is not None:
                await pairing  # bounded by the transport's own connect deadline
            if peer is not None:
                self._desk.peer_lost(peer)
                await peer.close()
                serving.ended.set()
                if self._serving.get(peer.ref) is serving:
                    del self._serving[peer.ref]

    async def _end_older(self, receiver: WorkerRef) -> None:
        """A receiver that opens a stream has given its last one up, but that one may still be read.

        An order or a cancel read from it later, or a failed write of it that lands later, would
        break what the receiver is told on the new one: that nothing of a transfer will be written.
        Bounded by the transport's write deadline.
        """
        if (older := self._serving.get(receiver)) is not None:
            older.outbox.close()
            await older.ended.wait()
