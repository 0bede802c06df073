"""In place of a process of the cluster: serves nothing, and shows its pid beside the socket."""

import asyncio
import json
import os
from pathlib import Path

from core.process import ProcessContext, run
from core.telemetry.names import Role


def show(path: Path, text: str) -> None:
    """Whole at once: the tests read it as soon as it is there."""
    partial = path.with_name(f"{path.name}.part")
    partial.write_text(text)
    partial.replace(path)


async def main(context: ProcessContext, stop: asyncio.Event) -> None:
    me = context.me
    gateway, scheduler = context.config.gateway, context.config.scheduler
    bound = {
        "gateway": {"http": gateway.http_port or 40001, "grpc": gateway.grpc_port or 40002},
        "gateway-1": {"http": 40011, "grpc": 40012},
        "scheduler": {"admin": scheduler.admin_port or 40003},
    }
    if me.name in bound:
        show(context.run_dir / f"{me.name}.json", json.dumps(bound[me.name]))
    (context.run_dir / f"{me.name}-{me.incarnation}.sock").touch()
    show(context.run_dir / f"{me.name}.pid", f"{os.getpid()} {me.incarnation}")
    context.mark_ready()
    await stop.wait()


if __name__ == "__main__":
    run(main, Role.GATEWAY)
