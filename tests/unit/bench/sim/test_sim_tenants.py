"""Two tenants in virtual time."""

import pytest

from bench.sim.tenants import WANTED_RATIO, flooded


def test_who_asks_for_little_is_served_long_before_who_floods(h100):
    found = flooded(h100, flood_rate=100, seconds=5)
    assert found.alone_s < found.beside_s < found.flood_s / 4


@pytest.mark.parametrize("flood_rate", [40, 100])
def test_who_asks_for_little_hardly_feels_the_flood(h100, flood_rate):
    assert flooded(h100, flood_rate=flood_rate, seconds=5).ratio <= WANTED_RATIO
