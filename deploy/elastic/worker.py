"""The elastic worker process: one model, one KV pool, both roles."""

import asyncio

import grpc

from core import log, process
from core.admin import Admin, serve_admin
from core.messages import WorkerRole
from core.process import ProcessContext
from core.telemetry.names import Role
from core.worker_service import serve_worker
from decode_worker.parts import DecodeParts, decode_parts
from deploy.elastic.desk import ElasticDesk
from prefill_worker.desk import PrefillDesk
from prefill_worker.service import PrefillService
from protos.tandem.internal.v1 import prefill_pb2_grpc

_ROLES = {WorkerRole.PREFILL: Role.PREFILL_WORKER, WorkerRole.DECODE: Role.DECODE_WORKER}


def run(role: WorkerRole) -> None:
    """The body of a `__main__`: a worker that begins in this role."""

    async def main(context: ProcessContext, stop: asyncio.Event) -> None:
        await _main(context, stop, role)

    process.run(main, _ROLES[role])


async def _main(context: ProcessContext, stop: asyncio.Event, role: WorkerRole) -> None:
    log.configure(context.config, context.me.name)
    async with serve_admin(context) as admin:
        admin.health.starting("the model is being loaded")
        async with decode_parts(context, admin) as parts:
            await _serve(context, stop, admin, parts, role)


async def _serve(
    context: ProcessContext,
    stop: asyncio.Event,
    admin: Admin,
    parts: DecodeParts,
    role: WorkerRole,
) -> None:
    config, me = context.config, context.me
    prefill = PrefillDesk(
        me, parts.host, config.transfer, parts.tickets, parts.metrics, context.tracer
    )
    service = PrefillService(
        prefill, me, parts.compatibility, parts.tickets, config.transfer.faults
    )
    desk = ElasticDesk(
        parts.desk,
        prefill,
        role,
        reads_prompts=parts.reads_prompts,
        turn_timeout_s=config.drain_timeout_s,
    )

    def add_services(server: grpc.aio.Server) -> None:
        parts.add_service(server)
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(service, server)

    await serve_worker(
        context,
        stop,
        admin=admin,
        desk=desk,
        role=role,
        compatibility=parts.compatibility,
        num_blocks=parts.host.spec.num_blocks,
        add_service=add_services,
        on_drained=parts.host.close,
        local_prefill=parts.reads_prompts and role is WorkerRole.DECODE,
        turning=desk,
    )
