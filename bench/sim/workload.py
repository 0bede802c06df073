"""What arrives at a simulated cluster, and when: a pure function of a description and a seed."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from bench.sim.request import SimRequest
from bench.sim.trace import HASHED_TOKENS, TraceRow
from core.errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """So many requests at so many per second, gamma-distributed gaps apart.

    `variation` is the gaps' standard deviation over their mean: 1 is a Poisson process. Lengths
    are drawn from the rows with replacement.
    """

    rate: float
    num_requests: int
    variation: float = 1.0
    seed: int = 1


def draw(
    rows: Sequence[TraceRow], arrivals: Arrivals, *, block_size: int, prefixes: bool = False
) -> list[SimRequest]:
    """Requests in the order of their arrival. Those of one seed differ in their times alone where
    only the rate does."""
    chance = random.Random(arrivals.seed)
    shape = 1 / arrivals.variation**2
    now_s = 0.0
    requests = []
    for index in range(arrivals.num_requests):
        if arrivals.variation == 1:
            now_s += chance.expovariate(1.0) / arrivals.rate
        else:
            now_s += chance.gammavariate(shape, 1 / shape) / arrivals.rate
        row = chance.choice(rows)
        requests.append(_request(index, now_s, row, block_size, prefixes=prefixes))
    return requests


def replay(
    rows: Sequence[TraceRow], *, speed: float, block_size: int, prefixes: bool = False
) -> list[SimRequest]:
    """The trace as it was, `speed` times as fast. Raises InvalidRequest where it has no times."""
    requests = []
    for index, row in enumerate(rows):
        if row.arrival_s is None:
            raise InvalidRequest(
                "the trace has no times: --rate says how many arrive", field="rate"
            )
        arrival_s = row.arrival_s / speed
        requests.append(_request(index, arrival_s, row, block_size, prefixes=prefixes))
    return requests


def check_arrivals(arrivals: Arrivals) -> None:
    """Raises InvalidRequest for what cannot be."""
    if not (math.isfinite(arrivals.rate) and arrivals.rate > 0):
        raise InvalidRequest(f"--rate must be positive, not {arrivals.rate:g}", field="rate")
    if not (math.isfinite(arrivals.variation) and 0.05 <= arrivals.variation <= 20):
        raise InvalidRequest(
            f"--variation must be 0.05 to 20, not {arrivals.variation:g}", field="variation"
        )
    if not 1 <= arrivals.num_requests <= 10_000_000:
        raise InvalidRequest(
            f"--requests must be 1 to 10,000,000, not {arrivals.num_requests}", field="requests"
        )


def _request(
    index: int, arrival_s: float, row: TraceRow, block_size: int, *, prefixes: bool
) -> SimRequest:
    return SimRequest(
        index=index,
        arrival_s=arrival_s,
        prompt_tokens=row.prompt_tokens,
        output_tokens=row.output_tokens,
        prefix=_prefix(row, block_size) if prefixes else (),
    )


def _prefix(row: TraceRow, block_size: int) -> tuple[bytes, ...]:
    """Hashes of the prompt's full blocks: a trace's id names its tokens and all before them."""
    count = min(row.prompt_tokens // block_size, len(row.hash_ids) * HASHED_TOKENS // block_size)
    hashes = []
    for block in range(count):
        last = (block + 1) * block_size - 1
        which, inside = divmod(last, HASHED_TOKENS)
        hashes.append(row.hash_ids[which].to_bytes(8, "big") + inside.to_bytes(8, "big"))
    return tuple(hashes)
