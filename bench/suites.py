"""Named comparisons: what they send, and how the clusters of this code are set for them."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.cluster import Settings
from bench.load.plan import LoadPlan
from bench.load.workloads import Shape
from core.errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One load of a comparison."""

    name: str
    plan: LoadPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """Cases, and what holds for every arm while they run.

    `settings` go to each cluster that is started here. A foreign server is told the same by its
    own command line; docs/benchmarks.md has vLLM's.
    """

    about: str
    cases: tuple[Case, ...]
    settings: Settings = field(default_factory=dict)
    # The arms where none is named, as --tandem takes them.
    tandem: tuple[str, ...] = ("split=1:1", "colocated=0:1")


def suite(name: str, data: Path | None, num_requests: int | None = None) -> Suite:
    """The suite of this name, with so many requests in each case. Raises InvalidRequest."""
    if name not in SUITES:
        raise InvalidRequest(f"no suite {name}: one of {', '.join(SUITES)}", field="suite")
    made = SUITES[name](data)
    if num_requests is None:
        return made
    cases = (
        replace(case, plan=replace(case.plan, num_requests=num_requests)) for case in made.cases
    )
    return replace(made, cases=tuple(cases))


def _random_case(concurrency: int, num_requests: int) -> Case:
    return Case(
        name=f"512 in, 64 out, {concurrency} at once",
        plan=LoadPlan(
            workload="random",
            shape=Shape(input_len=512, output_len=64),
            concurrency=concurrency,
            num_requests=num_requests,
            num_warmup=min(concurrency, 4),
        ),
    )


def _random(data: Path | None) -> Suite:
    return Suite(
        about="random tokens, prefix caches off",
        cases=(_random_case(1, 6), _random_case(8, 24), _random_case(16, 32)),
        settings={"engine": {"prefix_cache": False}},
    )


def _shared_prefix(data: Path | None) -> Suite:
    plan = LoadPlan(
        workload="shared-prefix",
        shape=Shape(output_len=64, data=data),
        concurrency=8,
        num_requests=32,
        num_warmup=2,
    )
    return Suite(
        about="eight worked examples before each question, prefix caches on",
        cases=(Case(name="shared prefix, 64 out, 8 at once", plan=plan),),
        settings={"engine": {"prefix_cache": True}},
    )


def _split(data: Path | None) -> Suite:
    arrivals = LoadPlan(
        workload="random",
        shape=Shape(input_len=512, output_len=64),
        rate=0.5,
        num_requests=24,
    )
    return Suite(
        about="two pools against one, the same engine, prefix caches off",
        cases=(
            _random_case(8, 24),
            _random_case(16, 32),
            Case(name="512 in, 64 out, 0.5 per second", plan=arrivals),
        ),
        settings={"engine": {"prefix_cache": False}},
    )


SUITES = {"random": _random, "shared-prefix": _shared_prefix, "split": _split}
