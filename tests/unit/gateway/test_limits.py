"""Token buckets, by a clock that the test turns."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import RateLimited
from gateway.limits import MemoryQuotas, Quota, Resource


class Clock:
    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def store(clock):
    return MemoryQuotas(clock)


def quota(per_minute, subject="key k", resource=Resource.TOKENS):
    return Quota(subject=subject, resource=resource, per_minute=per_minute)


async def test_a_minutes_worth_may_come_at_once_and_not_one_more(store):
    for left in (2, 1, 0):
        (allowance,) = await store.take([quota(3)], 1)
        assert allowance.remaining == left
    assert allowance.reset_s == 60
    with pytest.raises(RateLimited) as caught:
        await store.take([quota(3)], 1)
    assert caught.value.retry_after_s == pytest.approx(20)
    assert (caught.value.quota, caught.value.resource) == ("key k", "tokens")


async def test_what_the_error_promises_is_true(store, clock):
    await store.take([quota(600)], 600)
    with pytest.raises(RateLimited) as caught:
        await store.take([quota(600)], 100)
    clock.now_s += caught.value.retry_after_s + 1e-6
    await store.take([quota(600)], 100)


async def test_a_request_above_the_whole_quota_is_told_that_waiting_is_no_use(store):
    with pytest.raises(RateLimited, match="this request alone needs 11") as caught:
        await store.take([quota(10)], 11)
    assert caught.value.retry_after_s is None
    await store.take([quota(10)], 10)


async def test_either_all_quotas_are_taken_from_or_none(store):
    narrow, wide = quota(5), quota(100, "tenant t")
    await store.take([narrow, wide], 5)
    with pytest.raises(RateLimited) as caught:
        await store.take([wide, narrow], 1)
    assert caught.value.quota == "key k"
    (left,) = await store.take([wide], 1)
    assert left.remaining == 94


async def test_what_is_used_later_makes_a_debt_that_time_pays(store, clock):
    await store.take([quota(60)], 10)
    store.spend([quota(60)], 80)  # 30 below zero
    with pytest.raises(RateLimited) as caught:
        await store.take([quota(60)], 1)
    assert caught.value.retry_after_s == pytest.approx(31)
    clock.now_s += 31
    await store.take([quota(60)], 1)


async def test_what_is_given_back_is_there_again_but_never_more_than_the_whole(store):
    await store.take([quota(10)], 4)
    store.spend([quota(10)], -100)
    (left,) = await store.take([quota(10)], 1)
    assert left.remaining == 9


async def test_subjects_and_resources_have_buckets_of_their_own(store):
    await store.take([quota(1)], 1)
    await store.take([quota(1, "tenant k")], 1)
    await store.take([quota(1, resource=Resource.REQUESTS)], 1)


async def test_a_quota_that_the_operator_changes_counts_at_once(store, clock):
    await store.take([quota(100)], 10)
    with pytest.raises(RateLimited):
        await store.take([quota(5)], 6)
    (left,) = await store.take([quota(5)], 5)
    assert left.remaining == 0
    clock.now_s += 30
    (left,) = await store.take([quota(1000)], 0)
    assert left.remaining == 500


_STEP = st.tuples(
    st.floats(0, 90), st.integers(0, 120), st.sampled_from(["take", "spend", "give back"])
)


@settings(deadline=None)
@given(st.integers(1, 100), st.lists(_STEP, max_size=60))
async def test_no_more_is_admitted_than_a_minutes_worth_and_the_rate(per_minute, steps):
    """Over any span from the start: taken + spent - given back ≤ one minute's worth + rate · time,
    but for what was spent after the last admission; and never is a request refused that fits."""
    clock = Clock()
    store = MemoryQuotas(clock)
    bound = quota(per_minute)
    level = float(per_minute)
    for passed_s, amount, kind in steps:
        clock.now_s += passed_s
        level = min(per_minute, level + passed_s * per_minute / 60)
        if kind == "take":
            try:
                (left,) = await store.take([bound], amount)
            except RateLimited as error:
                assert amount > level - 1e-6
                assert (error.retry_after_s is None) == (amount > per_minute)
            else:
                assert amount <= level + 1e-6
                level -= amount
                assert math.isclose(left.remaining, max(0, level), abs_tol=1.0)
        else:
            used = amount if kind == "spend" else -amount
            store.spend([bound], used)
            level = min(per_minute, level - used)
