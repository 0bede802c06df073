"""`tandem run`: one process of a cluster, the others being elsewhere."""

import asyncio
from pathlib import Path
from typing import Annotated, Literal

import typer


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command(
        name="run",
        epilog="[bold]Examples[/bold]\n\n"
        "  tandem run scheduler --config cluster.toml\n\n"
        "  tandem run decode --config cluster.toml --name decode-0 --advertise-host 10.0.0.7\n\n"
        "  tandem run decode --config two-models.toml --serves qwen\n\n"
        "All processes of a cluster are given the same file, with `network.schedulers` and a "
        "secret. A variable such as TANDEM__GATEWAY__HTTP_PORT wins over the file, a flag over "
        "both.",
    )(run)


def run(
    role: Annotated[
        Literal["gateway", "scheduler", "prefill", "decode"],
        typer.Argument(help="Which process: gateway, scheduler, prefill or decode."),
    ],
    name: Annotated[
        str | None, typer.Option(help="Its name, unique in the cluster. Default: ROLE-HOSTNAME.")
    ] = None,
    scheduler: Annotated[
        list[str] | None, typer.Option(help="Where the scheduler listens, as host:port.")
    ] = None,
    advertise_host: Annotated[
        str | None, typer.Option(help="The address by which other processes reach this one.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A GGUF file, a Hugging Face folder, a hub id, or the default's name."),
    ] = None,
    serves: Annotated[
        str | None, typer.Option(help="Of several models, the one that a worker serves.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A TOML file; docs/configuration.md has its settings.")
    ] = None,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"] | None, typer.Option(help="What is logged.")
    ] = None,
) -> None:
    """Run one process of a cluster whose others run elsewhere, until Ctrl-C or SIGTERM."""
    from cli.serving import serve_until_told
    from cli.settings import cluster_config, reachable_at
    from deploy.lone import LoneProcess
    from deploy.names import process_name

    flags: dict[str, object] = {
        "model": model,
        "network.schedulers": tuple(scheduler) if scheduler else None,
        "network.advertise_host": advertise_host,
        "log_level": log_level,
    }
    settings = reachable_at(cluster_config(config, flags))
    if role in ("prefill", "decode") or serves is not None:
        settings = settings.of_model_named(serves)
    called = process_name(role, name)
    process = LoneProcess(role, settings, name=called)
    asyncio.run(serve_until_told(process))
