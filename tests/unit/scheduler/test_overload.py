"""Far more is asked than can be served: what is served comes in time, the rest is told at once."""

import random
import statistics

import pytest
from virtual_cluster import VirtualCluster

AT_ONCE_S = 0.05
SECONDS = 60.0
WARM_S = 10.0


def poisson(rate, seconds, seed):
    rng, now_s = random.Random(seed), 0.0
    while (now_s := now_s + rng.expovariate(rate)) < seconds:
        yield now_s


def goodput(cluster, since_s=WARM_S, until_s=SECONDS):
    good = [f for f in cluster.fates.values() if f.good and since_s <= f.ended_s < until_s]
    return len(good) / (until_s - since_s)


@pytest.fixture(scope="module")
def capacity():
    """Requests a second where there is always a next one and nobody is in a hurry."""
    cluster = VirtualCluster()
    for _ in range(2000):
        cluster.ask(0.0, remaining_s=1e6)
    cluster.run(SECONDS)
    return goodput(cluster)


@pytest.mark.parametrize("remaining_s", [3.0, 10.0])
def test_at_ten_times_the_capacity_goodput_stays(capacity, remaining_s):
    cluster = VirtualCluster()
    for at_s in poisson(10 * capacity, SECONDS, seed=1):
        cluster.ask(at_s, remaining_s=remaining_s)
    cluster.run(SECONDS + remaining_s)
    assert goodput(cluster) >= 0.9 * capacity
    # From the time on at which the queue's speed has been measured.
    later = [f for f in cluster.fates.values() if f.asked_s >= WARM_S]
    refused = [f for f in later if f.refused_s is not None]
    at_once = [f for f in refused if f.refused_s - f.asked_s <= AT_ONCE_S]
    assert len(refused) > 8 * (SECONDS - WARM_S) * capacity
    assert len(at_once) >= 0.98 * len(refused)
    wasted = [f for f in cluster.fates.values() if f.ended_s is not None and not f.good]
    assert len(wasted) <= 0.05 * SECONDS * capacity


def test_below_its_capacity_nothing_is_refused(capacity):
    cluster = VirtualCluster()
    for at_s in poisson(0.7 * capacity, SECONDS, seed=2):
        cluster.ask(at_s)
    cluster.run(SECONDS + 20)
    assert all(fate.good for fate in cluster.fates.values())


def ttft_p90(fates):
    return statistics.quantiles((f.first_s - f.asked_s for f in fates), n=10)[-1]


def guests(flood_rate, capacity):
    cluster = VirtualCluster()
    for at_s in poisson(0.1 * capacity, SECONDS, seed=3):
        cluster.ask(at_s, tenant="guest")
    for at_s in poisson(flood_rate, SECONDS, seed=4) if flood_rate else ():
        cluster.ask(at_s, tenant="flood", prompt=64)
    cluster.run(SECONDS + 20)
    return cluster.of("guest")


def test_a_tenant_is_served_as_if_it_were_alone_though_another_floods(capacity):
    alone, beside = guests(0.0, capacity), guests(10 * capacity, capacity)
    assert all(fate.first_s is not None for fate in beside), "none of them was refused"
    assert ttft_p90(beside) <= 1.5 * ttft_p90(alone)
