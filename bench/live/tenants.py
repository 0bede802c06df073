"""`make bench-tenants`: what a flood of one tenant costs another one, on a running cluster.

The quiet tenant asks for a part of what the cluster can do, by itself and beside a flood of several
times that, in turns and at the same times. Ends with one line of JSON; exits with 1 where the quiet
tenant's p90 TTFT beside the flood is more than 1.5 times what it is alone, or a request of it
failed. The client needs a part of the same machine, which should do nothing else.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from bench.cluster import serving
from bench.live.arguments import parser, positive, shape
from bench.live.cluster import capacity_per_s, settings
from bench.live.steady import is_good
from bench.live.verdict import tell
from bench.load.client import LoadClient, Target, find_target
from bench.load.drive import open_loop
from bench.load.plan import LoadPlan, Place
from bench.load.request import Record
from bench.load.summary import Distribution
from core.api_keys import KeyEntry, entry_toml, hash_of, new_key
from core.errors import TandemError

WANTED_RATIO = 1.5
# The flood has filled the queue when the quiet tenant comes, and stays until its last answer.
_LEAD_S, _TAIL_S = 5.0, 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The records of one turn; `flood` is empty where the quiet tenant was alone."""

    quiet: Sequence[Record]
    flood: Sequence[Record] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Flooded:
    """TTFT in milliseconds, over all turns. Failed are those of the quiet tenant."""

    capacity_per_s: float
    quiet_per_s: float
    flood_per_s: float
    alone_ms: Distribution
    beside_ms: Distribution
    flood_ms: Distribution | None
    failed_alone: int
    failed_beside: int
    flood_good: int
    flood_requests: int

    @property
    def ratio(self) -> float:
        """p90 beside the flood to p90 alone."""
        return self.beside_ms.p90 / self.alone_ms.p90

    @property
    def kept(self) -> bool:
        """Whether the promise was, and nobody of the quiet tenant was turned away."""
        return self.ratio <= WANTED_RATIO and not self.failed_beside

    @classmethod
    def of(
        cls,
        alone: Sequence[Turn],
        beside: Sequence[Turn],
        *,
        capacity_per_s: float,
        quiet_per_s: float,
        flood_per_s: float,
        deadline_s: float,
    ) -> Self:
        """Raises TandemError where the quiet tenant got no answer at all."""
        quiet_alone = [record for turn in alone for record in turn.quiet]
        quiet_beside = [record for turn in beside for record in turn.quiet]
        flood = [record for turn in beside for record in turn.flood]
        alone_ms, beside_ms = _ttft(quiet_alone), _ttft(quiet_beside)
        if alone_ms is None or beside_ms is None:
            raise TandemError("the quiet tenant got no answer")
        return cls(
            capacity_per_s=capacity_per_s,
            quiet_per_s=quiet_per_s,
            flood_per_s=flood_per_s,
            alone_ms=alone_ms,
            beside_ms=beside_ms,
            flood_ms=_ttft(flood),
            failed_alone=sum(not record.ok for record in quiet_alone),
            failed_beside=sum(not record.ok for record in quiet_beside),
            flood_good=sum(is_good(record, deadline_s) for record in flood),
            flood_requests=len(flood),
        )


def _ttft(records: Sequence[Record]) -> Distribution | None:
    return Distribution.of_seconds(record.ttft_s for record in records if record.ok)


class Tenants:
    """Two tenants of one cluster, each with a load of its own."""

    def __init__(self, quiet: Target, flood: Target, plans: tuple[LoadPlan, LoadPlan]) -> None:
        self._targets = (quiet, flood)
        self._quiet, self._flood = plans

    def alone(self, number: int) -> Turn:
        """The quiet tenant by itself."""
        return Turn(quiet=asyncio.run(self._send_quiet(number, "alone")))

    def beside(self, number: int) -> Turn:
        """The same requests' lengths and times, with the flood around them."""
        return asyncio.run(self._both(number))

    async def _both(self, number: int) -> Turn:
        place = Place(case="tenants", round=number, arm="flood")
        last_s = self._quiet.arrivals_s(_quiet_place(number, "beside"))[-1]
        assert self._flood.rate is not None
        span_s = _LEAD_S + last_s + _TAIL_S
        plan = replace(self._flood, num_requests=max(2, round(span_s * self._flood.rate)))
        client = _client(self._targets[1], plan)
        requests, arrivals_s = plan.measured(place), plan.arrivals_s(place)
        async with asyncio.TaskGroup() as both:
            flood = both.create_task(open_loop(client, requests, arrivals_s))
            quiet = both.create_task(self._send_quiet(number, "beside", after_s=_LEAD_S))
        return Turn(quiet=quiet.result(), flood=flood.result())

    async def _send_quiet(self, number: int, arm: str, *, after_s: float = 0.0) -> list[Record]:
        place = _quiet_place(number, arm)
        arrivals_s = [after_s + at_s for at_s in self._quiet.arrivals_s(place)]
        client = _client(self._targets[0], self._quiet)
        return await open_loop(client, self._quiet.measured(place), arrivals_s)


def _quiet_place(number: int, arm: str) -> Place:
    return Place(seed=1, case="tenants", round=number, arm=arm)


def _client(target: Target, plan: LoadPlan) -> LoadClient:
    return LoadClient(target, ignore_eos=plan.ignore_eos, timeout_s=plan.timeout_s)


def flooded(asked: argparse.Namespace) -> Flooded:
    """On a cluster of its own. Raises TandemError."""
    each = shape(asked)
    positive(asked, "quiet", "flood", "requests", "rounds")
    keys = {tenant: new_key() for tenant in ("quiet", "flood")}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "keys.toml"
        file.write_text(
            "\n".join(
                entry_toml(KeyEntry(id=tenant, tenant=tenant, hash=hash_of(key)))
                for tenant, key in keys.items()
            )
        )
        with serving(settings(asked.deadline_s, {"api_keys_file": str(file)})) as cluster:
            quiet = find_target(cluster.http, api_key=keys["quiet"])
            flood = find_target(cluster.http, api_key=keys["flood"])
            capacity = capacity_per_s(
                flood,
                each,
                concurrency=asked.concurrency,
                num_requests=asked.capacity_requests,
                deadline_s=asked.deadline_s,
            )
            print(f"capacity: {capacity:.2f} requests/s", file=sys.stderr)
            calm = LoadPlan(
                rate=asked.quiet * capacity,
                num_requests=asked.requests,
                shape=each,
                timeout_s=2 * asked.deadline_s,
            ).checked()
            storm = replace(calm, rate=asked.flood * capacity)
            alone, beside = _turns(Tenants(quiet, flood, (calm, storm)), asked.rounds)
    return Flooded.of(
        alone,
        beside,
        capacity_per_s=capacity,
        quiet_per_s=asked.quiet * capacity,
        flood_per_s=asked.flood * capacity,
        deadline_s=asked.deadline_s,
    )


def _turns(tenants: Tenants, rounds: int) -> tuple[list[Turn], list[Turn]]:
    alone, beside = [], []
    for number in range(rounds):
        # Whoever comes second may find a warmer or a busier machine: take turns.
        if number % 2 == 0:
            alone.append(tenants.alone(number))
            beside.append(tenants.beside(number))
        else:
            beside.append(tenants.beside(number))
            alone.append(tenants.alone(number))
    return alone, beside


def main() -> int:
    """Prints the figures, and one line of JSON last; gives the exit code."""
    flags = parser("tenants", "What a flood of one tenant costs another one.")
    flags.add_argument("--quiet", type=float, default=0.2, help="of the capacity, the one asks for")
    flags.add_argument("--flood", type=float, default=4.0, help="times the capacity, the other")
    flags.add_argument("--requests", type=int, default=20, help="of the quiet one, in a turn")
    flags.add_argument("--rounds", type=int, default=2, help="of two turns, alone and beside")
    flags.set_defaults(input_len=256, output_len=32, concurrency=8, capacity_requests=40)
    try:
        found = flooded(flags.parse_args())
    except (TandemError, RuntimeError) as error:  # the latter: the cluster did not come up
        print(f"tandem: {error}", file=sys.stderr)
        return 2
    print(
        f"the quiet tenant's p90 TTFT: alone {found.alone_ms.p90:.0f} ms, beside the flood "
        f"{found.beside_ms.p90:.0f} ms ({found.ratio:.2f} times; wanted: {WANTED_RATIO}); "
        f"{found.failed_beside} of its requests failed"
    )
    if found.flood_ms is not None:
        print(
            f"the flood: {found.flood_good} of {found.flood_requests} answered in time, "
            f"p90 TTFT {found.flood_ms.p90:.0f} ms"
        )
    return tell("tenants", found, ratio=found.ratio)


if __name__ == "__main__":
    sys.exit(main())
