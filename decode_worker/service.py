"""The decode worker's gRPC service: one stream per gateway."""

from collections.abc import AsyncIterator
from typing import Any

import grpc

from core.messages import AttachHello, AttachWelcome, Cancel, KeepTrace, Start, WorkerRef
from core.stream import Outbox, serve_stream
from decode_worker.desk import DecodeDesk
from decode_worker.gateway_port import GatewayPort
from protos.tandem.internal.v1 import decode_pb2, decode_pb2_grpc


class DecodeService(decode_pb2_grpc.DecodeServiceServicer):
    """Serves gateways."""

    def __init__(self, desk: DecodeDesk, me: WorkerRef) -> None:
        self._desk = desk
        self._me = me

    async def Attach(
        self,
        request_iterator: AsyncIterator[decode_pb2.AttachRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[decode_pb2.AttachResponse]:
        """One gateway's stream: its hello, then its requests."""
        outbox = Outbox(decode_pb2.AttachResponse)
        port: GatewayPort | None = None

        def handle(message: Any) -> None:
            nonlocal port
            match message:
                case AttachHello() if port is None:
                    port = GatewayPort(message.gateway, outbox)
                    outbox.send(AttachWelcome(decode=self._me))
                case Start() if port is not None:
                    self._desk.start(message, port)
                case Cancel() if port is not None:
                    self._desk.cancel(message)
                case KeepTrace() if port is not None:
                    self._desk.keep_trace(message.request_id)
                case _:
                    raise ValueError("an attach stream begins with one hello")

        try:
            async for reply in serve_stream(request_iterator, outbox, handle):
                yield reply
        finally:
            if port is not None:
                self._desk.gateway_left(port)
