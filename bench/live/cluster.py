"""The small cluster that promises are asked of, and what it can do."""

from collections.abc import Mapping

from bench.cluster import Settings, merged
from bench.live.steady import Window
from bench.load.client import Target
from bench.load.measure import measure, warm_up
from bench.load.plan import LoadPlan, Place
from bench.load.workloads import Shape
from core.errors import Unavailable

_SMALL: Settings = {
    "prefill_workers": 1,
    "decode_workers": 1,
    "log_level": "warning",
    # No prompt is sent twice; a cache would have nothing to find.
    "engine": {"prefix_cache": False, "threads": 1},
}


def settings(deadline_s: float, gateway: Mapping[str, object] | None = None) -> Settings:
    """One worker of each kind; every request has this long."""
    return merged(_SMALL, {"gateway": {"default_timeout_s": deadline_s, **(gateway or {})}})


def capacity_per_s(
    target: Target, shape: Shape, *, concurrency: int, num_requests: int, deadline_s: float
) -> float:
    """Answers per second while so many users each wait for one.

    Raises Unavailable where the cluster does not answer, or answers nobody in time.
    """
    plan = LoadPlan(
        concurrency=concurrency,
        num_requests=num_requests,
        num_warmup=concurrency,
        shape=shape,
        timeout_s=2 * deadline_s,
    ).checked()
    place = Place(case="capacity")
    if (failure := warm_up(target, plan, place)) is not None:
        raise Unavailable(f"{target.address.url}: {failure.kind}: {failure.detail}")
    records = measure(target, plan, place).records
    found = Window.of_closed_loop(records, concurrency).good_per_s(records, deadline_s)
    if found <= 0:
        raise Unavailable(
            f"no answer came within {deadline_s:g} s with {concurrency} requests at once: "
            "a longer --deadline-s or a smaller --concurrency is needed"
        )
    return found
