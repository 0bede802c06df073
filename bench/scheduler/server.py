"""The scheduler's real service in a process of its own, and one gateway's stream that loads it."""

import asyncio
import multiprocessing
import os
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import grpc
import structlog

from bench.scheduler import fakes
from core import rpc
from core.config import SchedulerConfig
from core.messages import GatewayHello, Placement, Prefilled, Settle, WorkerRef, WorkerRole
from core.stream import StreamLink
from core.tickets import Tickets
from protos.tandem.internal.v1 import scheduler_pb2, scheduler_pb2_grpc
from scheduler.desk import SchedulerDesk
from scheduler.front_desk import FrontDesk
from scheduler.service import SchedulerService

_BLOCKS = 50_000
_SEQS = 64
_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceFigures:
    """Placements a second of the whole exchange, and of one core of the scheduler's process."""

    per_s: float
    per_core_s: float


def measure(address: str, *, num_workers: int, in_flight: int, count: int) -> ServiceFigures:
    """Keeps `in_flight` requests with the service until `count` were placed, prefilled and ended.

    `address` is a gRPC target to listen on.
    """
    here, there = multiprocessing.get_context("spawn").Pipe()
    server = multiprocessing.get_context("spawn").Process(
        target=_serve, args=(address, num_workers, there)
    )
    server.start()
    try:
        if not here.poll(_TIMEOUT_S):
            raise TimeoutError("the service did not come up")
        here.recv()
        client = _Client(address, in_flight)
        asyncio.run(client.run(in_flight * 4))  # connections, caches, the first garbage collection
        cpu_s = _ask(here, "cpu")
        started_s = time.perf_counter()
        asyncio.run(_Client(address, in_flight).run(count))
        took_s = time.perf_counter() - started_s
        return ServiceFigures(
            per_s=count / took_s, per_core_s=count / max(_ask(here, "cpu") - cpu_s, 1e-9)
        )
    finally:
        here.send("stop")
        server.join(_TIMEOUT_S)


def _ask(server: Connection, what: str) -> float:
    server.send(what)
    return float(server.recv())


def _serve(address: str, num_workers: int, control: Connection) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    asyncio.run(_serve_until_stopped(address, num_workers, control))


async def _serve_until_stopped(address: str, num_workers: int, control: Connection) -> None:
    desk = SchedulerDesk(SchedulerConfig(max_queued=100_000), fakes.MODEL, Tickets(bytes(32)))
    for number in range(num_workers):
        role = WorkerRole.PREFILL if number % 2 else WorkerRole.DECODE
        member = desk.worker_joined(fakes.hello(role, number, num_blocks=_BLOCKS, max_seqs=_SEQS))
        desk.worker_says(member, fakes.load(_BLOCKS))
        desk.worker_cached(member, fakes.cached(number))
    server = rpc.server()
    me = WorkerRef(name="scheduler", incarnation="1")
    service = SchedulerService(FrontDesk([desk]), me)
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(service, server)
    server.add_insecure_port(address)
    await server.start()
    deciding = asyncio.create_task(desk.run())
    control.send("ready")
    while (order := await asyncio.to_thread(control.recv)) != "stop":
        assert order == "cpu"
        times = os.times()
        control.send(times.user + times.system)
    deciding.cancel()
    await rpc.stop_server(server, 0.1)


class _Client:
    """A gateway whose requests end as soon as they are placed."""

    def __init__(self, address: str, in_flight: int) -> None:
        self._me = WorkerRef(name=f"gateway-{os.urandom(4).hex()}", incarnation="1")
        self._asked = 0
        self._in_flight = in_flight
        self._left = 0
        self._done = asyncio.Event()
        self._link = StreamLink(
            address,
            _open,
            scheduler_pb2.ScheduleRequest,
            hello=lambda: [GatewayHello(gateway=self._me)],
            on_message=self._received,
            on_down=lambda: None,
        )

    async def run(self, count: int) -> None:
        """Until so many requests were placed."""
        self._left = count
        linked = asyncio.create_task(self._link.run_once())
        await asyncio.sleep(0)  # the link has its outbox now
        for _ in range(self._in_flight):
            self._ask()
        async with asyncio.timeout(_TIMEOUT_S):
            await self._done.wait()
        linked.cancel()
        await asyncio.gather(linked, return_exceptions=True)

    def _ask(self) -> None:
        self._link.send(fakes.enqueue(self._asked))
        self._asked += 1

    def _received(self, message: Any) -> None:
        if not isinstance(message, Placement):
            return
        self._link.send(Prefilled(transfer=message.transfer))
        self._link.send(Settle(transfer=message.transfer))
        self._left -= 1
        if self._left <= 0:
            self._done.set()
        elif self._left >= self._in_flight:
            self._ask()


def _open(channel: grpc.aio.Channel) -> object:
    return scheduler_pb2_grpc.SchedulerServiceStub(channel).Schedule
