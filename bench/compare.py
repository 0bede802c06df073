"""Several arms under the same loads, in turns: A B, then B A, and so on.

Only one arm is loaded at a time. Whoever goes first in a round goes last in the next, so that a
machine which slowly gets faster or slower favours none. Ratios are taken within a round.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bench.arms import RunningArm
from bench.load.measure import Measurement, WarmUpFailed, measure, warm_up
from bench.load.plan import Place
from bench.load.summary import Distribution, Summary
from bench.process_tree import Memory, MemoryWatch
from bench.suites import Case


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One arm under one load, once."""

    case: str
    round: int
    arm: str
    measurement: Measurement
    memory: Memory | None

    @property
    def figures(self) -> dict[str, float | None]:
        """What is compared, by name."""
        summary = self.measurement.summary
        memory_mib = None if self.memory is None else self.memory.pss_bytes / 2**20
        return {name: get(summary) for name, get in METRICS.items()} | {"pss_mib": memory_mib}


def _of(which: str, statistic: str) -> Callable[[Summary], float | None]:
    def get(summary: Summary) -> float | None:
        found: Distribution | None = getattr(summary, which)
        return None if found is None else float(getattr(found, statistic))

    return get


METRICS: Mapping[str, Callable[[Summary], float | None]] = {
    "output_tokens_per_s": lambda summary: summary.output_tokens_per_s,
    "requests_per_s": lambda summary: summary.requests_per_s,
    "goodput_requests_per_s": lambda summary: summary.goodput_requests_per_s,
    "ttft_ms_p50": _of("ttft_ms", "p50"),
    "ttft_ms_p99": _of("ttft_ms", "p99"),
    "itl_ms_p50": _of("itl_ms", "p50"),
    "itl_ms_p99": _of("itl_ms", "p99"),
    "tpot_ms_p50": _of("tpot_ms", "p50"),
    "tpot_ms_p99": _of("tpot_ms", "p99"),
    "e2e_ms_p50": _of("e2e_ms", "p50"),
}


def compare(
    arms: Sequence[RunningArm],
    cases: Sequence[Case],
    *,
    rounds: int,
    seed: int,
    tell: Callable[[str], None],
) -> list[Turn]:
    """Every arm under every case, `rounds` times.

    Raises InvalidRequest where a case does not fit a model, and WarmUpFailed where an arm answers
    nothing from the start. An arm that dies later is measured on: its errors are in the turns.
    """
    for arm in arms:
        for case in cases:
            case.plan.checked().fitted(arm.target.window)
    # All have the same lengths: those that the smallest window takes.
    windows = [arm.target.window for arm in arms if arm.target.window is not None]
    window = min(windows, default=None)
    turns = []
    for case in cases:
        planned = replace(case, plan=case.plan.checked().fitted(window))
        for number in range(rounds):
            for arm in in_turn(arms, number):
                turn = _take_turn(arm, planned, number, seed)
                tell(f"{case.name}, round {number + 1}, {arm.name}: {_brief(turn)}")
                turns.append(turn)
    return turns


def in_turn(arms: Sequence[RunningArm], number: int) -> list[RunningArm]:
    """The arms in the order of this round."""
    first = number % len(arms)
    return [*arms[first:], *arms[:first]]


def _take_turn(arm: RunningArm, case: Case, number: int, seed: int) -> Turn:
    place = Place(seed=seed, case=case.name, round=number, arm=arm.name)
    with arm.turn():
        failure = warm_up(arm.target, case.plan, place)
        if failure is not None and number == 0:
            raise WarmUpFailed(f"{arm.name}: {failure.kind}: {failure.detail}")
        with MemoryWatch(arm.tree) as watch:
            measurement = measure(arm.target, case.plan, place)
    return Turn(
        case=case.name,
        round=number,
        arm=arm.name,
        measurement=measurement,
        memory=watch.peak,
    )


def _brief(turn: Turn) -> str:
    summary = turn.measurement.summary
    errors = f", {sum(summary.errors.values())} errors" if summary.errors else ""
    return f"{summary.output_tokens_per_s:.1f} tokens/s{errors}"


def figures(turns: Sequence[Turn], baseline: str) -> dict[str, Any]:
    """By case: each arm's rounds and their medians, and its ratios to the baseline's."""
    found: dict[str, Any] = {}
    for case in dict.fromkeys(turn.case for turn in turns):
        of_case = [turn for turn in turns if turn.case == case]
        arms = {
            name: [turn for turn in of_case if turn.arm == name]
            for name in dict.fromkeys(turn.arm for turn in sorted(of_case, key=_round))
        }
        base = arms[baseline]
        found[case] = {
            "arms": {name: _arm(mine) for name, mine in arms.items()},
            "ratios": {
                name: ratios([turn.figures for turn in mine], [turn.figures for turn in base])
                for name, mine in arms.items()
                if name != baseline
            },
        }
    return found


def _round(turn: Turn) -> int:
    return turn.round


def _arm(turns: Sequence[Turn]) -> dict[str, Any]:
    each = [turn.figures for turn in turns]
    errors: dict[str, int] = {}
    for turn in turns:
        for kind, count in turn.measurement.summary.errors.items():
            errors[kind] = errors.get(kind, 0) + count
    return {
        "median": {name: _median([figures[name] for figures in each]) for name in each[0]},
        "errors": errors,
        "rounds": [
            {
                **asdict(turn.measurement.summary),
                "client_cpu_share": turn.measurement.client_cpu_share,
                "memory": None if turn.memory is None else asdict(turn.memory),
            }
            for turn in turns
        ],
    }


def ratios(
    mine: Sequence[Mapping[str, float | None]], base: Sequence[Mapping[str, float | None]]
) -> dict[str, dict[str, Any]]:
    """By metric: the ratio in each round, and their median. Left out where there is nothing."""
    found = {}
    for name in mine[0]:
        pairs = [(m[name], b[name]) for m, b in zip(mine, base, strict=True)]
        each = [m / b for m, b in pairs if m is not None and b]
        if each:
            found[name] = {"median": statistics.median(each), "rounds": each}
    return found


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
