"""A decode worker put together: pool, engine, receivers, desk and service."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import structlog

from core import process
from core.admin import Admin
from core.errors import ConfigError
from core.messages import Compatibility
from core.metrics.worker import WorkerMetrics
from core.process import ProcessContext
from core.tickets import Tickets, load_secret
from decode_worker.desk import DecodeDesk
from decode_worker.service import DecodeService
from engine.device import place_of
from engine.host import EngineHost, build_host, default_threads
from engine.kv_cache import KvSpec, PoolMemory
from kv_transfer import shm
from kv_transfer.compatibility import compatibility_of
from kv_transfer.transport import make_receivers
from protos.tandem.internal.v1 import decode_pb2_grpc


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeParts:
    """What serves, until the context that made it ends. Whoever serves ends `host`'s compute."""

    host: EngineHost
    compatibility: Compatibility
    tickets: Tickets
    metrics: WorkerMetrics
    desk: DecodeDesk
    service: DecodeService
    reads_prompts: bool

    def add_service(self, server: grpc.aio.Server) -> None:
        """Has the server serve gateways."""
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(self.service, server)


@asynccontextmanager
async def decode_parts(context: ProcessContext, admin: Admin) -> AsyncIterator[DecodeParts]:
    """Loads the model and makes everything around it. Raises ConfigError where it cannot be had."""
    config = context.config
    secret = load_secret(context.run_dir)
    wanted = config.transfer.transport
    segment: shm.Segment | None = None

    def pool_memory(spec: KvSpec) -> PoolMemory | None:
        nonlocal segment
        if wanted not in ("auto", shm.NAME):
            return None
        try:
            segment = shm.Segment.create(context.me, spec.num_blocks, spec.block_bytes)
        except ConfigError as error:
            if wanted == shm.NAME:
                raise
            structlog.get_logger().warning("shm_not_used", why=error.message)
            return None
        return PoolMemory(segment.buffer, segment.file, segment.OFFSET)

    try:
        host = await build_host(
            context.card,
            config.engine,
            kv_bytes=config.engine.decode_kv_bytes,
            cpu_kv_bytes=4 * 2**30,
            place=place_of(context.me.name, config),
            threads=default_threads(),
            secret=secret,
            make_memory=pool_memory,
            ranks=config.engine.decode_tensor_parallel,
            ranks_setting="engine.decode_tensor_parallel",
            on_rank_lost=process.die,
        )
        tickets = Tickets(secret, fence=context.fence)
        receivers = make_receivers(
            *(wanted, context.me, host.kv.bytes, segment, config.transfer, tickets),
            device_pool=host.kv.device_bytes,
        )
        compatibility = compatibility_of(
            context.card,
            dtype=config.engine.numbers,
            block_size=host.block_size,
            block_bytes=host.whole_block_bytes,
        )
        reads_prompts = config.scheduler.local_prefill != "never"
        metrics = WorkerMetrics(admin.registry, admin.vllm)
        desk = DecodeDesk(
            context.me,
            host,
            compatibility,
            receivers,
            config.transfer,
            tickets,
            reads_prompts=reads_prompts,
            metrics=metrics,
            tracer=context.tracer,
            dial=context.dial,
        )
        yield DecodeParts(
            host=host,
            compatibility=compatibility,
            tickets=tickets,
            metrics=metrics,
            desk=desk,
            service=DecodeService(desk, context.me),
            reads_prompts=reads_prompts,
        )
        for receiver in receivers.values():
            receiver.close()
    finally:
        if segment is not None:
            segment.unlink()
