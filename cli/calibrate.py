"""`tandem calibrate`: a profile for `tandem simulate`, of a running cluster or a GPU's grid."""

import sys
from pathlib import Path
from typing import Annotated

import typer

_EXIT_WRONG = 2
_EPILOG = (
    "[bold]Examples[/bold]\n\n"
    "  tandem calibrate cpu.json\n\n"
    "  tandem calibrate h200.json --grid times.csv --grid-model meta-llama/Meta-Llama-3.1-8B "
    "--profile my-gpu.json\n\n"
    "The cluster must be idle and hand every prompt over; docs/simulation.md says with which "
    "settings."
)


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command(epilog=_EPILOG)(calibrate)


def calibrate(
    out: Annotated[Path, typer.Argument(help="The profile to write.")],
    url: Annotated[str, typer.Option(help="Where the cluster listens.")] = "http://127.0.0.1:8000",
    admin_url: Annotated[
        str, typer.Option(help="Where its scheduler's admin server does.")
    ] = "http://127.0.0.1:8001",
    block_size: Annotated[int, typer.Option(help="Its engine.block_size.")] = 16,
    grid: Annotated[
        Path | None, typer.Option(help="A CSV of step times, instead of a cluster.")
    ] = None,
    grid_model: Annotated[
        str, typer.Option(help="The grid's rows of this model.")
    ] = "meta-llama/Meta-Llama-3.1-8B",
    profile: Annotated[
        str, typer.Option(help="Whose device and model the grid is of: a file, or a name.")
    ] = "h100-llama-3.1-8b",
) -> None:
    """Measure what steps, messages and transfers take, and write it down for the simulator."""
    from bench.sim.profile import load_roofline, store
    from core.errors import TandemError

    try:
        if grid is not None:
            from bench.sim.fit import fit, read_grid

            fitted = fit(read_grid(grid, grid_model), load_roofline(profile))
            store(fitted.profile, out)
            print(
                f"{out}: off by {fitted.prefill_error:.1%} for prompts and "
                f"{fitted.decode_error:.1%} for decode steps, on average"
            )
            return
        import os

        from bench.load.client import find_target
        from bench.sim.calibrate import calibrate as measure

        target = find_target(url, api_key=os.environ.get("OPENAI_API_KEY"))
        timing = measure(target, admin_url, block_size=block_size, name=out.stem, tell=_to_stderr)
        store(timing, out)
        print(f"{out}: written")
    except TandemError as error:
        print(f"tandem: {error.message}", file=sys.stderr)
        raise typer.Exit(_EXIT_WRONG) from error


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr)
