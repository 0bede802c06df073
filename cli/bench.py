"""`tandem bench`: a load on a running server, and what came of it."""

import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from bench.load.client import Target
    from bench.load.measure import Measurement
    from bench.load.plan import LoadPlan

_EXIT_WRONG = 2
_EPILOG = (
    "[bold]Examples[/bold]\n\n"
    "  tandem bench\n\n"
    "  tandem bench --input-len 512 --output-len 64 --concurrency 16 --requests 64\n\n"
    "  tandem bench --workload shared-prefix --json\n\n"
    "  tandem bench --rate 2 --slo-ttft-ms 500 --slo-tpot-ms 100 --plot latencies.png\n\n"
    "docs/benchmarks.md says what is measured, and how to compare servers. A server that wants a "
    "key gets the one in OPENAI_API_KEY."
)


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command(epilog=_EPILOG)(bench)


def bench(
    url: Annotated[str, typer.Option(help="Where the server listens.")] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option(help="Default: the first that the server names.")
    ] = None,
    workload: Annotated[
        str, typer.Option(help="random, chat, shared-prefix, or poisson (a trace's lengths).")
    ] = "random",
    requests: Annotated[int, typer.Option(help="How many count.")] = 32,
    concurrency: Annotated[
        int | None, typer.Option(help="So many at once; 8 where there is no rate.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="So many per second, whatever comes back.")
    ] = None,
    warmup: Annotated[int, typer.Option(help="Requests before, that do not count.")] = 1,
    input_len: Annotated[
        int | None, typer.Option(help="Tokens of a random prompt; default 512.")
    ] = None,
    output_len: Annotated[int | None, typer.Option(help="Tokens of an answer; default 64.")] = None,
    respect_eos: Annotated[
        bool, typer.Option("--respect-eos", help="Answers end where the model ends them.")
    ] = False,
    data: Annotated[
        Path | None, typer.Option(help="A folder of public traces and question sets.")
    ] = None,
    trace: Annotated[str | None, typer.Option(help="Whose lengths poisson has.")] = None,
    length_scale: Annotated[
        float | None, typer.Option(help="Makes a trace's lengths shorter, as 0.25.")
    ] = None,
    token_ids: Annotated[
        str | None, typer.Option(help="LOW:HIGH, what random prompts consist of.")
    ] = None,
    slo_ttft_ms: Annotated[
        float | None, typer.Option(help="For the goodput: the latest first token.")
    ] = None,
    slo_tpot_ms: Annotated[
        float | None, typer.Option(help="For the goodput: the longest time per further token.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for each request.")] = 600.0,
    seed: Annotated[int, typer.Option(help="Another seed sends other prompts.")] = 1,
    json: Annotated[
        bool, typer.Option("--json", help="JSON to stdout; the table goes to stderr.")
    ] = False,
    raw: Annotated[Path | None, typer.Option(help="A file for every request's times.")] = None,
    plot: Annotated[Path | None, typer.Option(help="A PNG of the latencies.")] = None,
) -> None:
    """Put a load on a running server, and tell how it answered."""
    from bench.load.plan import LoadPlan, parse_token_ids
    from bench.load.summary import Slo
    from bench.load.workloads import ORDINARY_TOKENS, Shape
    from core.errors import TandemError

    try:
        shape = Shape(
            input_len=input_len,
            output_len=output_len,
            trace=trace,
            length_scale=length_scale,
            data=data,
            token_ids=parse_token_ids(token_ids) if token_ids else ORDINARY_TOKENS,
        )
        plan = LoadPlan(
            workload=workload,
            num_requests=requests,
            concurrency=concurrency,
            rate=rate,
            num_warmup=warmup,
            shape=shape,
            slo=Slo(ttft_ms=slo_ttft_ms, tpot_ms=slo_tpot_ms),
            ignore_eos=not respect_eos,
            timeout_s=timeout,
        )
        _run(plan.checked(), url, model, seed=seed, as_json=json, raw=raw, picture=plot)
    except TandemError as error:
        print(f"tandem: {error.message}", file=sys.stderr)
        raise typer.Exit(_EXIT_WRONG) from error


def _run(
    plan: "LoadPlan",
    url: str,
    model: str | None,
    *,
    seed: int,
    as_json: bool,
    raw: Path | None,
    picture: Path | None,
) -> None:
    import os

    from bench.load.client import find_target
    from bench.load.measure import measure_once
    from bench.load.plan import Place
    from bench.load.table import one_load
    from bench.plot import check_plot, plot
    from bench.raw import as_json as records_json
    from bench.raw import check_writable, write_json

    if picture is not None:
        check_plot(picture)
    if raw is not None:
        check_writable(raw)
    target = find_target(url, model=model, api_key=os.environ.get("OPENAI_API_KEY"))
    measurement = measure_once(target, plan.fitted(target.window), Place(seed=seed))
    print(one_load(measurement), file=sys.stderr if as_json else sys.stdout)
    document = _document(plan, target, measurement, seed)
    if as_json:
        import json

        print(json.dumps(document))
    if raw is not None:
        write_json(raw, {**document, "requests": records_json(measurement.records)})
    if picture is not None:
        plot({plan.workload: {target.model: measurement.records}}, picture)
    if not measurement.summary.completed:
        raise typer.Exit(1)


def _document(
    plan: "LoadPlan", target: "Target", measurement: "Measurement", seed: int
) -> Mapping[str, Any]:
    from bench.environment import describe

    return {
        "url": target.address.url,
        "model": target.model,
        "workload": plan.workload,
        "concurrency": plan.concurrency,
        "rate": plan.rate,
        "seed": seed,
        **asdict(measurement.summary),
        "client_cpu_share": measurement.client_cpu_share,
        "environment": describe(),
    }
