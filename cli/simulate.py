"""`tandem simulate`: a cluster in virtual time, and what came of a load there."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from bench.sim.scenario import Scenario

_EXIT_WRONG = 2
_EPILOG = (
    "[bold]Examples[/bold]\n\n"
    "  tandem simulate --rate 20\n\n"
    "  tandem simulate --prefill 1 --decode 3 --trace azure-conv --data DIR --rate 70 "
    "--slo-ttft-ms 400 --slo-tbt10-ms 30\n\n"
    "  tandem simulate --trace mine.csv --find-rate --slo-ttft-ms 400 --slo-tbt10-ms 30\n\n"
    "  tandem simulate --trace mine.jsonl --plan 4 --slo-ttft-ms 400 --slo-tpot-ms 50\n\n"
    "docs/simulation.md says what is modelled, what a trace's columns are called, and how to "
    "describe another GPU."
)


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command(epilog=_EPILOG)(simulate)


def simulate(
    prefill: Annotated[int, typer.Option(help="Prefill workers.")] = 1,
    decode: Annotated[int, typer.Option(help="Decode workers.")] = 1,
    profile: Annotated[
        str, typer.Option(help="What steps take: a file, or a name of docs/simulation.md.")
    ] = "h100-llama-3.1-8b",
    trace: Annotated[
        str | None, typer.Option(help="A public trace's name, or a .csv or .jsonl file.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="The folder of the public traces.")] = None,
    input_len: Annotated[int, typer.Option(help="Prompt tokens, without a trace.")] = 512,
    output_len: Annotated[int, typer.Option(help="Answer tokens, without a trace.")] = 64,
    rate: Annotated[
        float | None, typer.Option(help="Requests per second. Without it: the trace's own times.")
    ] = None,
    speed: Annotated[float, typer.Option(help="Plays a trace's own times so much faster.")] = 1.0,
    requests: Annotated[int, typer.Option(help="How many, with a rate.")] = 1500,
    variation: Annotated[
        float, typer.Option(help="Of the gaps between arrivals; 1 is Poisson, more is burstier.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Another seed draws others.")] = 1,
    system: Annotated[
        Literal["tandem", "split", "colocated"],
        typer.Option(help="This code's cluster, or a baseline."),
    ] = "tandem",
    chunk: Annotated[int, typer.Option(help="Tokens of a step, colocated.")] = 512,
    local_prefill: Annotated[
        Literal["auto", "never", "always"], typer.Option(help="As scheduler.local_prefill.")
    ] = "auto",
    itl_target_ms: Annotated[
        float | None,
        typer.Option(
            help="As engine.itl_target_s. 0: none. Default: nine tenths of the SLO's gap, else 18."
        ),
    ] = None,
    prefill_step_tokens: Annotated[
        int, typer.Option(help="A prefill worker's engine.max_step_tokens.")
    ] = 8192,
    block_size: Annotated[int, typer.Option(help="As engine.block_size.")] = 16,
    prefix_cache: Annotated[
        bool, typer.Option("--prefix-cache", help="Prompts share blocks, as the trace says.")
    ] = False,
    elastic: Annotated[
        bool, typer.Option("--elastic", help="Workers turn, as with scheduler.elastic = auto.")
    ] = False,
    report_interval: Annotated[
        float, typer.Option(help="As scheduler.report_interval_s: how stale views are.")
    ] = 1.0,
    kill: Annotated[
        list[str] | None,
        typer.Option(help="decode-0@30+5: dies after 30 s, is back 5 s later; may be repeated."),
    ] = None,
    slo_ttft_ms: Annotated[float | None, typer.Option(help="The latest first token.")] = None,
    slo_tbt10_ms: Annotated[
        float | None, typer.Option(help="The mean of the longest tenth of an answer's gaps.")
    ] = None,
    slo_tpot_ms: Annotated[float | None, typer.Option(help="The mean gap of an answer.")] = None,
    slo_share: Annotated[float, typer.Option(help="Of the requests that keep to it all.")] = 0.9,
    find_rate: Annotated[
        bool, typer.Option("--find-rate", help="Search the highest rate that keeps to the SLO.")
    ] = False,
    plan: Annotated[
        int | None, typer.Option(help="So many workers: search pools, chunk and local budget.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="JSON to stdout, text to stderr.")] = False,
    record: Annotated[
        Path | None, typer.Option(help="A file for what the scheduler was told and answered.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="A PNG of the latencies.")] = None,
) -> None:
    """Run a load on a cluster in virtual time: the real scheduler and planner, a model of time."""
    from bench.sim.figures import SimSlo
    from bench.sim.scenario import Scenario, parse_death
    from bench.sim.shape import ClusterShape
    from core.errors import TandemError

    try:
        slo = SimSlo(
            ttft_ms=slo_ttft_ms, tbt10_ms=slo_tbt10_ms, tpot_ms=slo_tpot_ms, share=slo_share
        ).checked()
        scenario = Scenario(
            shape=ClusterShape(
                prefill_workers=prefill,
                decode_workers=decode,
                block_size=block_size,
                prefill_step_tokens=prefill_step_tokens,
                itl_target_s=slo.itl_target_s if itl_target_ms is None else itl_target_ms / 1e3,
                local_prefill=local_prefill,
                elastic="auto" if elastic else "off",
                report_interval_s=report_interval,
                prefix_cache=prefix_cache,
            ),
            system=system,
            chunk=chunk,
            profile=profile,
            trace=trace,
            data=data,
            lengths=(input_len, output_len),
            rate=rate,
            speed=speed,
            num_requests=requests,
            variation=variation,
            seed=seed,
            slo=slo,
            deaths=tuple(parse_death(text) for text in kill or ()),
        )
        _quiet()
        if plan is not None:
            _plan(scenario, plan, as_json=json)
        elif find_rate:
            _find_rate(scenario, as_json=json)
        else:
            _run(scenario, as_json=json, record=record, picture=plot)
    except TandemError as error:
        print(f"tandem: {error.message}", file=sys.stderr)
        raise typer.Exit(_EXIT_WRONG) from error


def _quiet() -> None:
    """The scheduler's log is one of real workers."""
    import logging

    import structlog

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))


def _run(scenario: "Scenario", *, as_json: bool, record: Path | None, picture: Path | None) -> None:
    from bench.plot import check_plot
    from bench.raw import check_writable
    from bench.sim.plot import plot
    from bench.sim.report import one_run
    from bench.sim.scenario import new_log, simulate

    if picture is not None:
        check_plot(picture)
    log = None
    if record is not None:
        check_writable(record)
        log = new_log(scenario)
    figures, outcomes = simulate(scenario, log)
    print(one_run(figures, scenario.slo), file=sys.stderr if as_json else sys.stdout)
    if as_json:
        _print_json({"seed": scenario.seed, "system": scenario.system, **asdict(figures)})
    if log is not None and record is not None:
        log.store(record)
    if picture is not None:
        plot(outcomes, scenario.slo, f"{scenario.system}, simulated", picture)


def _find_rate(scenario: "Scenario", *, as_json: bool) -> None:
    from bench.sim.search import find_rate

    rate = find_rate(scenario)
    print(f"{rate:.3g} requests per second", file=sys.stderr if as_json else sys.stdout)
    if as_json:
        _print_json({"goodput_requests_per_s": rate})


def _plan(scenario: "Scenario", workers: int, *, as_json: bool) -> None:
    from bench.sim.search import described, plan

    best = plan(scenario, workers, tell=lambda line: print(line, file=sys.stderr))
    print(
        f"best: {described(best.shape)}: {best.goodput:.3g} requests per second",
        file=sys.stderr if as_json else sys.stdout,
    )
    if as_json:
        _print_json({"goodput_requests_per_s": best.goodput, **asdict(best.shape)})


def _print_json(document: dict[str, object]) -> None:
    import json

    print(json.dumps(document))
