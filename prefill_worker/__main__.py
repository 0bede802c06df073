"""The prefill worker process: `python -m prefill_worker`, started by a launcher."""

import asyncio

from core import log, process
from core.admin import Admin, serve_admin
from core.messages import WorkerRole
from core.metrics.worker import WorkerMetrics
from core.process import ProcessContext
from core.telemetry.names import Role
from core.tickets import Tickets, load_secret
from core.worker_service import serve_worker
from engine.device import place_of
from engine.host import build_host, default_threads
from kv_transfer.compatibility import compatibility_of
from prefill_worker.desk import PrefillDesk
from prefill_worker.service import PrefillService
from protos.tandem.internal.v1 import prefill_pb2_grpc


async def main(context: ProcessContext, stop: asyncio.Event) -> None:
    """Loads the model and serves until told to stop."""
    log.configure(context.config, context.me.name)
    async with serve_admin(context) as admin:
        admin.health.starting("the model is being loaded")
        await _serve(context, stop, admin)


async def _serve(context: ProcessContext, stop: asyncio.Event, admin: Admin) -> None:
    config = context.config
    secret = load_secret(context.run_dir)
    tickets = Tickets(secret, fence=context.fence)
    host = await build_host(
        context.card,
        config.engine,
        kv_bytes=config.engine.prefill_kv_bytes,
        cpu_kv_bytes=2 * 2**30,
        place=place_of(context.me.name, config),
        threads=default_threads(),
        secret=secret,
        ranks=config.engine.prefill_tensor_parallel,
        ranks_setting="engine.prefill_tensor_parallel",
        on_rank_lost=process.die,
    )
    compatibility = compatibility_of(
        context.card,
        dtype=config.engine.numbers,
        block_size=host.block_size,
        block_bytes=host.whole_block_bytes,
    )
    metrics = WorkerMetrics(admin.registry, admin.vllm)
    desk = PrefillDesk(context.me, host, config.transfer, tickets, metrics, context.tracer)
    service = PrefillService(desk, context.me, compatibility, tickets, config.transfer.faults)
    await serve_worker(
        context,
        stop,
        admin=admin,
        desk=desk,
        role=WorkerRole.PREFILL,
        compatibility=compatibility,
        num_blocks=host.spec.num_blocks,
        add_service=lambda server: prefill_pb2_grpc.add_PrefillServiceServicer_to_server(
            service, server
        ),
        on_drained=host.close,
    )


if __name__ == "__main__":
    process.run(main, Role.PREFILL_WORKER)
