"""`tandem top`: a cluster at work, on a terminal."""

import asyncio
from typing import Annotated

import typer

_EPILOG = (
    "[bold]Examples[/bold]\n\n"
    "  tandem top\n\n"
    "  tandem top --admin-url http://10.0.0.7:8001 --interval 5\n\n"
    "q ends it, p holds it. The same is on the gateway's admin port as a page."
)


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command(epilog=_EPILOG)(top)


def top(
    admin_url: Annotated[
        str, typer.Option(help="The scheduler's admin server.")
    ] = "http://127.0.0.1:8001",
    interval: Annotated[
        float, typer.Option(min=0.2, max=60, help="Seconds from one look to the next.")
    ] = 1.0,
) -> None:
    """Watch the pools, the queue, KV blocks, latencies and transfers of a running cluster."""
    asyncio.run(_watch(admin_url, interval))


async def _watch(admin_url: str, interval_s: float) -> None:
    from cli.operator_client import OperatorClient
    from cli.top_screen import TopApp

    async with OperatorClient(admin_url) as client:
        await client.snapshot()  # where there is no cluster, this says so in a line
        await TopApp(client, admin_url, interval_s=interval_s).run_async()
