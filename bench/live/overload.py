"""`make bench-overload`: what a cluster still does when ten times what it can is asked of it.

First users who wait for their answers find the capacity; then requests arrive at ten times that,
each with the same deadline, whatever becomes of those before. Goodput counts answers that are
whole and in time. Who gets nothing is to know at once. Ends with one line of JSON; exits with 1
where a promise was broken. The client needs a part of the same machine, which should do nothing
else.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from bench.cluster import serving
from bench.live.arguments import parser, positive, shape
from bench.live.cluster import capacity_per_s, settings
from bench.live.steady import Window, is_good, refusal_s
from bench.live.verdict import tell
from bench.load.client import find_target
from bench.load.measure import measure
from bench.load.plan import LoadPlan, Place
from bench.load.request import Record
from bench.load.summary import Distribution
from core.errors import TandemError

WANTED_SHARE = 0.9
WANTED_REFUSAL_MS = 50.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Overloaded:
    """What became of the load. `refusal_ms` is of those who got no token at all.

    `wasted` requests got tokens, and yet no whole answer in time: work that served nobody.
    """

    offered_per_s: float
    capacity_per_s: float
    goodput_per_s: float
    good: int
    refused: int
    wasted: int
    refusal_ms: Distribution | None
    errors: dict[str, int]
    max_late_ms: float

    @property
    def share(self) -> float:
        """Of the capacity, what is still goodput."""
        return self.goodput_per_s / self.capacity_per_s

    @property
    def kept(self) -> bool:
        """Whether both promises were."""
        quick = self.refusal_ms is None or self.refusal_ms.p99 <= WANTED_REFUSAL_MS
        return self.share >= WANTED_SHARE and quick

    @classmethod
    def of(
        cls,
        records: Sequence[Record],
        *,
        capacity_per_s: float,
        offered_per_s: float,
        settle_s: float,
        deadline_s: float,
    ) -> Self:
        """Of an open loop's records. Raises Unavailable where it was too short."""
        window = Window.of_open_loop(records, settle_s)
        refusals = [took_s for r in records if (took_s := refusal_s(r)) is not None]
        good = sum(is_good(record, deadline_s) for record in records)
        return cls(
            offered_per_s=offered_per_s,
            capacity_per_s=capacity_per_s,
            goodput_per_s=window.good_per_s(records, deadline_s),
            good=good,
            refused=len(refusals),
            wasted=len(records) - good - len(refusals),
            refusal_ms=Distribution.of_seconds(refusals),
            errors=dict(Counter(r.failure.kind for r in records if r.failure is not None)),
            max_late_ms=1e3 * max(r.sent_s - r.intended_s for r in records),
        )


def overloaded(asked: argparse.Namespace) -> Overloaded:
    """On a cluster of its own. Raises TandemError."""
    each = shape(asked)
    positive(asked, "times", "seconds", "settle_s")
    with serving(settings(asked.deadline_s)) as cluster:
        target = find_target(cluster.http)
        capacity = capacity_per_s(
            target,
            each,
            concurrency=asked.concurrency,
            num_requests=asked.capacity_requests,
            deadline_s=asked.deadline_s,
        )
        print(f"capacity: {capacity:.2f} requests/s", file=sys.stderr)
        rate = asked.times * capacity
        plan = LoadPlan(
            rate=rate,
            num_requests=max(2, round(rate * asked.seconds)),
            shape=each,
            timeout_s=2 * asked.deadline_s,
        ).checked()
        records = measure(target, plan, Place(case="overload")).records
    return Overloaded.of(
        records,
        capacity_per_s=capacity,
        offered_per_s=rate,
        settle_s=asked.settle_s,
        deadline_s=asked.deadline_s,
    )


def main() -> int:
    """Prints the figures, and one line of JSON last; gives the exit code."""
    flags = parser("overload", "What a cluster does at ten times its capacity.")
    flags.add_argument("--times", type=float, default=10.0, help="the capacity is offered")
    flags.add_argument("--seconds", type=float, default=60.0, help="for which it is offered")
    flags.add_argument("--settle-s", type=float, default=5.0, help="whose answers do not count")
    try:
        found = overloaded(flags.parse_args())
    except (TandemError, RuntimeError) as error:  # the latter: the cluster did not come up
        print(f"tandem: {error}", file=sys.stderr)
        return 2
    print(
        f"{found.offered_per_s:.1f} requests/s offered: {found.goodput_per_s:.2f} answered in time "
        f"per second, {found.share:.0%} of the capacity (wanted: {WANTED_SHARE:.0%}); "
        f"{found.refused} refused, {found.wasted} begun in vain"
    )
    if (told := found.refusal_ms) is not None:
        print(
            f"a refusal comes after {told.p50:.0f} ms (p50), {told.p90:.0f} (p90), "
            f"{told.p99:.0f} (p99; wanted: {WANTED_REFUSAL_MS:.0f}), {told.max:.0f} (max)"
        )
    return tell("overload", found, share=found.share)


if __name__ == "__main__":
    sys.exit(main())
