"""The scheduler's gRPC service: streams in, desk, streams out."""

from collections.abc import AsyncIterator
from typing import Any

import grpc

from core.errors import ModelNotFound, to_failure
from core.messages import (
    CacheNews,
    GatewayHello,
    TurnedAway,
    WorkerHello,
    WorkerLoad,
    WorkerRef,
)
from core.stream import Outbox, serve_stream
from protos.tandem.internal.v1 import scheduler_pb2, scheduler_pb2_grpc
from scheduler.cluster import Member
from scheduler.desk import SchedulerDesk
from scheduler.front_desk import FrontDesk
from scheduler.leadership import Leadership


class SchedulerService(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Serves gateways and workers."""

    def __init__(
        self, desk: FrontDesk, me: WorkerRef, leadership: Leadership | None = None
    ) -> None:
        self._desk = desk
        self._leadership = leadership or Leadership(me)

    async def Schedule(
        self,
        request_iterator: AsyncIterator[scheduler_pb2.ScheduleRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[scheduler_pb2.ScheduleResponse]:
        """One gateway's stream. Its first message says which gateway it is."""
        outbox = Outbox(scheduler_pb2.ScheduleResponse)
        reply = outbox.send  # one object: it also tells this stream from others of the gateway
        gateway = ""
        served = True

        def handle(message: Any) -> None:
            nonlocal gateway, served
            if isinstance(message, GatewayHello):
                served = self._leadership.greets(outbox, message.leader_token)
                gateway = str(message.gateway) if served else ""
            if not served:
                return
            if not gateway:
                raise ValueError("a schedule stream begins with a hello")
            self._desk.gateway_says(gateway, message, reply)

        try:
            async for response in serve_stream(request_iterator, outbox, handle):
                yield response
        finally:
            self._leadership.left(outbox)
            if gateway:
                self._desk.gateway_left(gateway, reply)

    async def Register(
        self,
        request_iterator: AsyncIterator[scheduler_pb2.RegisterRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[scheduler_pb2.RegisterResponse]:
        """One worker's stream. Its first message says which worker it is.

        One whose model nobody here knows is told so, and heard no further.
        """
        outbox = Outbox(scheduler_pb2.RegisterResponse)
        joined: tuple[SchedulerDesk, Member] | None = None
        served = True

        def handle(message: Any) -> None:
            nonlocal joined, served
            if isinstance(message, WorkerHello):
                if not (served := self._leadership.greets(outbox, message.leader_token)):
                    return
                try:
                    joined = self._desk.worker_joined(message)
                    joined[1].tell = outbox.send
                except ModelNotFound as error:
                    served = False
                    outbox.send(TurnedAway(failure=to_failure(error)))
            elif not served:
                return
            elif joined is not None:
                desk, member = joined
                if isinstance(message, WorkerLoad):
                    desk.worker_says(member, message)
                elif isinstance(message, CacheNews):
                    desk.worker_cached(member, message)
            else:
                raise ValueError("a register stream begins with a hello")

        try:
            async for reply in serve_stream(request_iterator, outbox, handle):
                yield reply
        finally:
            self._leadership.left(outbox)
            if joined is not None:
                desk, member = joined
                desk.worker_left(member)
