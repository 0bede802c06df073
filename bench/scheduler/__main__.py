"""`python -m bench.scheduler`: what a placement costs. Ends with one JSON line.

The policy is measured with a full queue and many workers: `policy_us` is `decide` for a placement,
where events come together as they do under load, `policy_single_us` where each comes by itself;
`desk_us` is the CPU time of all that a request costs from its arrival to its end.
The service is measured over gRPC from a second process: placements for each second of CPU that the
scheduler's process took.
"""

import argparse
import json
import statistics
import tempfile
from dataclasses import asdict
from pathlib import Path

import structlog

from bench.scheduler import desk, server

_TOGETHER = 16
GOALS = {"policy_us": 100.0, "service_per_core_s": 5000.0}


def main() -> None:
    """Measures, prints, and says whether the goals were met."""
    parser = argparse.ArgumentParser(prog="python -m bench.scheduler", description=__doc__)
    parser.add_argument("--queued", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--placements", type=int, default=2000)
    parser.add_argument("--service-workers", type=int, default=8)
    parser.add_argument("--service-placements", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    rounds = {
        together: [
            desk.measure(
                num_queued=options.queued,
                num_workers=options.workers,
                num_placements=options.placements,
                together=together,
            )
            for _ in range(options.rounds)
        ]
        for together in (_TOGETHER, 1)
    }
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        services = [
            server.measure(
                f"unix:{Path(folder) / str(number)}",
                num_workers=options.service_workers,
                in_flight=256,
                count=options.service_placements,
            )
            for number in range(min(3, options.rounds))
        ]
    figures = {
        "queued": options.queued,
        "workers": options.workers,
        "service_workers": options.service_workers,
        "policy_us": statistics.median(each.policy_us for each in rounds[_TOGETHER]),
        "policy_us_p10": statistics.median(each.policy_us_p10 for each in rounds[_TOGETHER]),
        "policy_single_us": statistics.median(each.policy_us for each in rounds[1]),
        "desk_us": statistics.median(each.desk_us for each in rounds[_TOGETHER]),
        "service_per_s": statistics.median(each.per_s for each in services),
        "service_per_core_s": statistics.median(each.per_core_s for each in services),
        "rounds": {str(key): list(map(asdict, each)) for key, each in rounds.items()},
    }
    print(f"{options.queued} queued, {options.workers} workers:")
    print(f"  decide             {figures['policy_us']:8.0f} µs a placement, median")
    print(f"                     {figures['policy_us_p10']:8.0f} µs the tenth disturbed least")
    print(f"    one by one         {figures['policy_single_us']:8.0f} µs")
    print(f"  the whole desk     {figures['desk_us']:8.0f} µs a request")
    print(f"over gRPC, {options.service_workers} workers:")
    print(f"  of one core        {figures['service_per_core_s']:8.0f} placements/s")
    print(f"  by the clock       {figures['service_per_s']:8.0f} placements/s")
    met = {
        "policy_us": figures["policy_us"] <= GOALS["policy_us"],
        "service_per_core_s": figures["service_per_core_s"] >= GOALS["service_per_core_s"],
    }
    print(json.dumps({"goals": GOALS, "met": met, **figures}))


if __name__ == "__main__":
    main()
