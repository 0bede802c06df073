"""`tandem trace`: where the time of a recent request went, stage by stage."""

import asyncio
from typing import Annotated, Any

import typer

_EPILOG = (
    "[bold]Examples[/bold]\n\n"
    "  tandem trace\n\n"
    "  tandem trace --search failed\n\n"
    "  tandem trace chatcmpl-3f2a91\n\n"
    "Each gateway remembers its last requests (telemetry.recent_requests), and no word of them."
)


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command(epilog=_EPILOG)(trace)


def trace(
    wanted: Annotated[
        str | None,
        typer.Argument(
            metavar="[ID]",
            help="A request id, a job or a trace id, or how one begins. Without: the last ones.",
        ),
    ] = None,
    search: Annotated[str, typer.Option(help="Of the last ones, those with these words.")] = "",
    limit: Annotated[int, typer.Option(min=1, max=200, help="How many of the last ones.")] = 20,
    admin_url: Annotated[
        str, typer.Option(help="The scheduler's admin server.")
    ] = "http://127.0.0.1:8001",
) -> None:
    """Show a recent request's waterfall, through every process."""
    from rich.console import Console

    from cli.waterfall import listed, waterfall

    console = Console()
    if wanted is None:
        console.print(listed(asyncio.run(_recent(admin_url, search, limit))))
        return
    for told in asyncio.run(_request(admin_url, wanted)):
        console.print(waterfall(told, console.width))


async def _recent(admin_url: str, search: str, limit: int) -> list[dict[str, Any]]:
    from cli.operator_client import OperatorClient

    async with OperatorClient(admin_url) as client:
        return await client.recent(search, limit)


async def _request(admin_url: str, wanted: str) -> list[dict[str, Any]]:
    from cli.operator_client import OperatorClient

    async with OperatorClient(admin_url) as client:
        return await client.request(wanted)
