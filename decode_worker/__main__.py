"""The decode worker process: `python -m decode_worker`, started by a launcher."""

import asyncio

from core import log, process
from core.admin import serve_admin
from core.messages import WorkerRole
from core.process import ProcessContext
from core.telemetry.names import Role
from core.worker_service import serve_worker
from decode_worker.parts import decode_parts


async def main(context: ProcessContext, stop: asyncio.Event) -> None:
    """Loads the model and serves until told to stop."""
    log.configure(context.config, context.me.name)
    async with serve_admin(context) as admin:
        admin.health.starting("the model is being loaded")
        async with decode_parts(context, admin) as parts:
            await serve_worker(
                context,
                stop,
                admin=admin,
                desk=parts.desk,
                role=WorkerRole.DECODE,
                compatibility=parts.compatibility,
                num_blocks=parts.host.spec.num_blocks,
                add_service=parts.add_service,
                on_drained=parts.host.close,
                local_prefill=parts.reads_prompts,
            )


if __name__ == "__main__":
    process.run(main, Role.DECODE_WORKER)
