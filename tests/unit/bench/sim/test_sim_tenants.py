"""Two tenants in virtual time."""

from bench.sim.tenants import flooded


def test_who_asks_for_little_is_served_long_before_who_floods(h100):
    found = flooded(h100, flood_rate=100, seconds=5)
    assert found.alone_s < found.beside_s < found.flood_s / 4
