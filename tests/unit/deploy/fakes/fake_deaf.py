"""A process that serves and does not stop when it is asked to."""

import asyncio

from core.process import ProcessContext, run
from core.telemetry.names import Role


async def main(context: ProcessContext, stop: asyncio.Event) -> None:
    context.mark_ready()
    await asyncio.Event().wait()


if __name__ == "__main__":
    run(main, Role.GATEWAY)
