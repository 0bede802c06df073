"""The streams to prefill workers: one per life of a worker, opened when first needed."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from core import rpc
from core.errors import TandemError, WorkerLost, from_failure
from core.messages import Endpoint, HandoffHello, HandoffMessage, HandoffReply, HandoffWelcome
from core.stream import StreamLink
from protos.tandem.internal.v1 import prefill_pb2, prefill_pb2_grpc


class PrefillLink:
    """One stream to one life of one prefill worker.

    `welcomed` is done once the pair agreed on a transport; it raises Incompatible or Unavailable
    where they cannot work together. A link that went down stays down.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        hello: HandoffHello,
        *,
        on_message: Callable[["PrefillLink", HandoffReply], None],
        on_down: Callable[["PrefillLink"], None],
        dial: rpc.Dial,
    ) -> None:
        self.endpoint = endpoint
        self.transport = ""
        self.up = True
        self.welcomed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_message = on_message
        self._on_down = on_down
        self._link = StreamLink(
            endpoint.address,
            _open,
            prefill_pb2.HandoffRequest,
            hello=lambda: [hello],
            on_message=self._received,
            on_down=self._lost,
            dial=dial,
        )

    async def run(self) -> None:
        """Until the stream is lost."""
        await self._link.run_once()

    def send(self, message: HandoffMessage) -> bool:
        """False where the peer will not get it."""
        return self._link.send(message)

    def _received(self, message: Any) -> None:
        if not isinstance(message, HandoffWelcome):
            self._on_message(self, message)
        elif message.failure is not None:
            self._refuse(from_failure(message.failure))
        elif message.prefill != self.endpoint.worker:
            self._refuse(WorkerLost(f"{self.endpoint.worker} was replaced by {message.prefill}"))
        elif not self.welcomed.done():
            self.transport = message.transport
            self.welcomed.set_result(None)

    def _lost(self) -> None:
        self.up = False
        self._refuse(WorkerLost(f"prefill worker {self.endpoint.worker} is lost"))
        self._on_down(self)

    def _refuse(self, error: TandemError) -> None:
        if not self.welcomed.done():
            error.culprit = self.endpoint.worker
            self.welcomed.set_exception(error)
            self.welcomed.exception()  # nobody need be waiting


def _open(channel: grpc.aio.Channel) -> object:
    return prefill_pb2_grpc.PrefillServiceStub(channel).Handoff
