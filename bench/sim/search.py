"""Which cluster to run for an SLO: a search over the pools, the prefill chunk and local reading."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from bench.sim.comparison import Load, tandem
from bench.sim.goodput import PRECISION
from bench.sim.possible import check_possible
from bench.sim.scenario import DEFAULT_RATE, Scenario
from bench.sim.shape import ClusterShape
from bench.sim.timing import Timing
from core.errors import InvalidRequest

_PREFILL_STEPS = (2048, 8192)
# Of the bound on gaps, what a decode worker's steps aim at. 0: it reads no prompts.
_TARGET_SHARES = (0.0, 0.6, 0.9)
# Without a bound on gaps.
_LOOSEST_TARGET_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A cluster, and the highest rate at which it keeps to the SLO."""

    shape: ClusterShape
    goodput: float


def search(
    load: Load,
    timing: Timing,
    base: ClusterShape,
    workers: int,
    *,
    tell: Callable[[str], None] = lambda line: None,
) -> list[Candidate]:
    """The clusters that were the best until a better one was found, the best first.

    Each is first asked for a little more than the best until then; most say no at once. Raises
    InvalidRequest where none keeps to the SLO at any rate.
    """
    found: list[Candidate] = []
    reason: InvalidRequest | None = None
    for shape in candidates(base, load, workers):
        make = tandem(shape, timing)
        guess = found[-1].goodput * (1 + PRECISION) if found else 1.0
        if found and load.share_at(guess, make) < load.slo.share:
            continue
        try:
            goodput = load.goodput(make, guess=guess)
        except InvalidRequest as error:
            reason = error
            continue
        found.append(Candidate(shape=shape, goodput=goodput))
        tell(f"{described(shape)}: {goodput:.3g} requests/s")
    if not found:
        raise reason or InvalidRequest("nothing to choose from", field="plan")
    return found[::-1]


def candidates(base: ClusterShape, load: Load, workers: int) -> Iterator[ClusterShape]:
    """Every split, with every chunk and every local budget that differs in anything."""
    targets = _targets(load.slo.gap_ms)
    for prefills in range(workers):
        for target_s in targets:
            if not prefills and target_s == 0.0:
                continue
            for step_tokens in _PREFILL_STEPS if prefills else _PREFILL_STEPS[:1]:
                yield replace(
                    base,
                    prefill_workers=prefills,
                    decode_workers=workers - prefills,
                    prefill_step_tokens=step_tokens,
                    itl_target_s=target_s or base.itl_target_s,
                    local_prefill="auto" if target_s else "never",
                )


def described(shape: ClusterShape, *, target: str = "") -> str:
    """A cluster in a few words; `target` stands for its steps' target, where that is no number."""
    local = (
        "no local prefill"
        if shape.local_prefill == "never"
        else f"local prefill within {target or f'{1e3 * shape.itl_target_s:g} ms'}"
    )
    return (
        f"{shape.prefill_workers}P{shape.decode_workers}D, steps of {shape.prefill_step_tokens} "
        f"prompt tokens, {local}"
    )


def _targets(gap_ms: float | None) -> Sequence[float]:
    if gap_ms is None:
        return (0.0, _LOOSEST_TARGET_S)
    return tuple(share * gap_ms / 1e3 for share in _TARGET_SHARES)


def find_rate(scenario: Scenario) -> float:
    """The highest rate at which the scenario keeps to its SLO. Raises InvalidRequest."""
    load, timing = _load(scenario)
    return load.goodput(lambda agenda: scenario.make(timing, agenda), guess=DEFAULT_RATE)


def plan(
    scenario: Scenario, workers: int, *, tell: Callable[[str], None] = lambda line: None
) -> Candidate:
    """The best cluster of so many workers for the scenario's load. Raises InvalidRequest."""
    if not 1 <= workers <= 64:
        raise InvalidRequest(f"--plan must be 1 to 64 workers, not {workers}", field="plan")
    load, timing = _load(scenario)
    return search(load, timing, scenario.shape, workers, tell=tell)[0]


def _load(scenario: Scenario) -> tuple[Load, Timing]:
    if not scenario.slo.checked():
        raise InvalidRequest(
            "without an SLO any rate will do: --slo-ttft-ms, --slo-tbt10-ms or --slo-tpot-ms",
            field="slo",
        )
    timing = scenario.timing()
    rows = scenario.rows(timing)
    check_possible(scenario.slo, rows, timing, prefix_cache=scenario.shape.prefix_cache)
    load = Load(
        lengths=rows,
        num_requests=scenario.num_requests,
        slo=scenario.slo,
        block_size=scenario.shape.block_size,
        variation=scenario.variation,
        prefixes=scenario.shape.prefix_cache,
        seed=scenario.seed,
    )
    load.arrivals(DEFAULT_RATE)
    return load, timing
