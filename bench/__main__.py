"""Servers side by side under the same load, in turns: `python -m bench`.

Progress and complaints go to stderr; tables to stdout, whose last line is the figures as JSON.
Exits with 2 where it was told something wrong or a server is not there, and with 1 where an arm
answered nothing in a whole case.
"""

import argparse
import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.arms import Arm, RunningArm, parse_command_arm, parse_ready, parse_url_arm
from bench.compare import Turn, compare, figures
from bench.comparison_table import comparison
from bench.environment import describe
from bench.load.plan import LoadPlan, parse_token_ids
from bench.load.summary import Slo
from bench.load.workloads import ORDINARY_TOKENS, WORKLOADS, Shape
from bench.plot import check_plot, plot
from bench.raw import check_writable, write_raw
from bench.suites import SUITES, Case, Suite, suite
from bench.tandem_arm import parse_tandem_arm
from core.errors import InvalidRequest, TandemError

_EXIT_WRONG = 2
# 128 and the signal's number, as shells say it.
_EXIT_INTERRUPTED = 128 + signal.SIGINT
_EXIT_TERMINATED = 128 + signal.SIGTERM
# What a suite has settled; only the number of requests may be another, for a shorter run.
_OF_A_WORKLOAD = (
    *("concurrency", "rate", "warmup", "input_len", "output_len", "trace", "length_scale"),
    *("token_ids", "slo_ttft_ms", "slo_tpot_ms", "respect_eos", "timeout"),
)


def main() -> None:
    """Runs the comparison."""
    # As an exception, so that the servers which were started here are ended on the way.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_EXIT_TERMINATED))
    try:
        sys.exit(_run(_parser().parse_args()))
    except TandemError as error:
        print(f"bench: {error.message}", file=sys.stderr)
        sys.exit(_EXIT_WRONG)
    except KeyboardInterrupt:
        sys.exit(_EXIT_INTERRUPTED)


def _run(args: argparse.Namespace) -> int:
    chosen = _chosen(args)
    arms = _arms(args, chosen)
    baseline = args.baseline or arms[-1].name
    if baseline not in {arm.name for arm in arms}:
        raise InvalidRequest(f"--baseline {baseline} is no arm", field="baseline")
    if args.rounds < 1:
        raise InvalidRequest(f"--rounds must be at least 1, not {args.rounds}", field="rounds")
    for case in chosen.cases:
        case.plan.checked()
    if args.plot is not None:
        check_plot(args.plot)
    if args.raw is not None:
        check_writable(args.raw)
    environment = describe()
    with contextlib.ExitStack() as stack:
        running = [_start(stack, arm) for arm in arms]
        turns = compare(running, chosen.cases, rounds=args.rounds, seed=args.seed, tell=_tell)
    found = figures(turns, baseline)
    document = {
        "about": chosen.about,
        "seed": args.seed,
        "baseline": baseline,
        "idle_cores": {arm.name: arm.idle_cores for arm in running},
        "environment": environment,
        "cases": found,
    }
    if args.raw is not None:
        write_raw(args.raw, document, turns)
    if args.plot is not None:
        plot(_records(turns), args.plot)
    print(comparison(found, baseline))
    print(json.dumps(document))
    return int(any(not arm["median"]["requests_per_s"] for arm in _of_all_cases(found)))


def _of_all_cases(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [arm for case in found.values() for arm in case["arms"].values()]


def _start(stack: contextlib.ExitStack, arm: Arm) -> RunningArm:
    _tell(f"{arm.name}: starting")
    running = stack.enter_context(arm.up())
    running.settle()
    if running.idle_cores is not None:
        paused = "; paused between its turns" if running.pausable else ""
        _tell(f"{arm.name}: up, {running.idle_cores:.2f} cores when idle{paused}")
    return running


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _records(turns: Sequence[Turn]) -> dict[str, dict[str, list[Any]]]:
    """By case and arm, the rounds one after another."""
    records: dict[str, dict[str, list[Any]]] = {}
    for turn in turns:
        of_arm = records.setdefault(turn.case, {}).setdefault(turn.arm, [])
        of_arm += turn.measurement.records
    return records


def _chosen(args: argparse.Namespace) -> Suite:
    if args.workload is None:
        for name in _OF_A_WORKLOAD:
            if getattr(args, name) not in (None, False):
                flag = "--" + name.replace("_", "-")
                raise InvalidRequest(f"{flag} goes with --workload, not with a suite", field=name)
        return suite(args.suite, args.data, args.requests)
    if args.workload == "poisson":
        name = f"{args.trace or 'poisson'}, {args.rate} per second"
    else:
        name = f"{args.workload}, {args.rate or args.concurrency or 'several'}"
    return Suite(about=args.workload, cases=(Case(name=name, plan=_plan(args)),), tandem=())


def _plan(args: argparse.Namespace) -> LoadPlan:
    default = LoadPlan()
    token_ids = ORDINARY_TOKENS if args.token_ids is None else parse_token_ids(args.token_ids)
    return LoadPlan(
        workload=args.workload,
        num_requests=default.num_requests if args.requests is None else args.requests,
        concurrency=args.concurrency,
        rate=args.rate,
        num_warmup=default.num_warmup if args.warmup is None else args.warmup,
        shape=Shape(
            input_len=args.input_len,
            output_len=args.output_len,
            trace=args.trace,
            length_scale=args.length_scale,
            data=args.data,
            token_ids=token_ids,
        ),
        slo=Slo(ttft_ms=args.slo_ttft_ms, tpot_ms=args.slo_tpot_ms),
        ignore_eos=not args.respect_eos,
        timeout_s=default.timeout_s if args.timeout is None else args.timeout,
    ).checked()


def _arms(args: argparse.Namespace, chosen: Suite) -> list[Arm]:
    ready_paths = dict(parse_ready(text) for text in args.ready)
    api_key = os.environ.get("OPENAI_API_KEY")
    arms: list[Arm] = [
        *(parse_tandem_arm(text, chosen.settings) for text in args.tandem or chosen.tandem),
        *(parse_command_arm(text, ready_paths) for text in args.serve),
        *(parse_url_arm(text, api_key) for text in args.arm),
    ]
    names = [arm.name for arm in arms]
    if not arms:
        raise InvalidRequest("no arm: --tandem, --serve or --arm names one", field="arm")
    if len(set(names)) < len(names):
        raise InvalidRequest(f"two arms of one name: {', '.join(names)}", field="arm")
    for name in ready_paths.keys() - names:
        raise InvalidRequest(f"--ready {name}: there is no such arm", field="ready")
    return arms


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=(__doc__ or "").partition("\n")[0], allow_abbrev=False
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--suite", default="random", help=f"one of {', '.join(SUITES)}")
    what.add_argument("--workload", help=f"instead of a suite: one of {', '.join(WORKLOADS)}")
    arms = parser.add_argument_group("arms, each may be given several times")
    arms.add_argument("--tandem", action="append", metavar="NAME=P:D[,SETTING=VALUE…]")
    arms.add_argument("--serve", action="append", default=[], metavar="NAME=COMMAND with {port}")
    arms.add_argument("--ready", action="append", default=[], metavar="NAME=PATH")
    arms.add_argument("--arm", action="append", default=[], metavar="NAME=URL")
    arms.add_argument("--baseline", help="whom the others are compared with; default: the last")
    load = parser.add_argument_group("the load")
    load.add_argument("--requests", type=int, help="measured ones of each turn")
    load.add_argument("--concurrency", type=int)
    load.add_argument("--rate", type=float, help="requests per second, whatever comes back")
    load.add_argument("--warmup", type=int, help="requests before each turn that do not count")
    load.add_argument("--input-len", type=int)
    load.add_argument("--output-len", type=int)
    load.add_argument("--trace", help="whose lengths poisson has")
    load.add_argument("--length-scale", type=float, help="makes a trace's lengths shorter")
    load.add_argument("--data", type=Path, help="a folder of traces and question sets")
    load.add_argument("--token-ids", metavar="LOW:HIGH", help="what random prompts consist of")
    load.add_argument("--respect-eos", action="store_true", help="answers end where they would")
    load.add_argument("--slo-ttft-ms", type=float)
    load.add_argument("--slo-tpot-ms", type=float)
    load.add_argument("--timeout", type=float, help="seconds for each request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--raw", type=Path, help="a file for every request's times")
    parser.add_argument("--plot", type=Path, help="a PNG of the latencies")
    return parser


if __name__ == "__main__":
    main()
