"""The highest rate of arrivals that a cluster serves well."""

from collections.abc import Callable

from core.errors import InvalidRequest

# Two rates that differ by less are one.
PRECISION = 0.01
# A guess is often near; where it is not, the search goes further each time.
_FIRST_STRIDE = 1.15
_LONGEST_STRIDE = 3.0
_LOWEST = 0.05  # of which each finds an idle cluster
_HIGHEST = 1e5

ShareAt = Callable[[float], float]


def highest_rate(
    share_at: ShareAt,
    share: float,
    *,
    guess: float = 8.0,
    precision: float = PRECISION,
    stride: float = _FIRST_STRIDE,
) -> float:
    """Requests per second at which at least `share` of them are good, by bisection.

    `share_at` runs a load of that rate. The answer was tried and is good, and one that is higher by
    `precision` was tried and is not. The search goes `stride` away from its guess first. Raises
    InvalidRequest where no rate is good: what is asked for cannot be had.
    """
    good, bad = None, None
    rate = guess
    while good is None or bad is None:
        found = share_at(rate)
        if found >= share:
            good, rate = rate, rate * stride
        else:
            bad, rate = rate, rate / stride
        stride = min(stride**2, _LONGEST_STRIDE)
        if good is not None and bad is not None:
            break
        if rate < _LOWEST:
            raise InvalidRequest(
                f"at {bad:.3g} requests per second {found:.0%} keep to the SLO, and {share:.0%} "
                "are asked for: no load is light enough",
                field="slo",
            )
        if rate > _HIGHEST:
            raise InvalidRequest(
                f"{good:.3g} requests per second keep to the SLO: it bounds nothing", field="slo"
            )
    while bad > good * (1 + precision):
        middle = (good * bad) ** 0.5
        if share_at(middle) >= share:
            good = middle
        else:
            bad = middle
    return good
