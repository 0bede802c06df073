"""What a caller may use, in memory and in Redis alike; shared by gateways where it is in Redis."""

import asyncio
import contextlib

import pytest

from core.config import RedisConfig
from core.errors import RateLimited
from core.store.redis_link import RedisLink
from gateway.limits import MemoryQuotas, Quota, Resource
from gateway.redis_quotas import RedisQuotas

# A loaded machine is no dead Redis.
PATIENT = RedisConfig(timeout_s=5.0)
# Fills so slowly that a test does not see it.
REQUESTS = Quota(subject="key k", resource=Resource.REQUESTS, per_minute=5)
TENANT = Quota(subject="tenant t", resource=Resource.REQUESTS, per_minute=3)
TOKENS = Quota(subject="key k", resource=Resource.TOKENS, per_minute=60)


@contextlib.asynccontextmanager
async def gateway(server, config=PATIENT):
    """The quotas of one gateway."""
    link = RedisLink(server.url, config)
    quotas = RedisQuotas(link)
    tasks = [asyncio.create_task(link.run()), asyncio.create_task(quotas.run())]
    try:
        yield quotas
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


@pytest.fixture(params=["memory", "redis"])
async def quotas(request):
    if request.param == "memory":
        yield MemoryQuotas()
        return
    server = request.getfixturevalue("redis")
    server.say("FLUSHALL")
    async with gateway(server) as made:
        yield made


async def admitted(quotas, wanted, *, tries=20, amount=1):
    """How many of so many requests are admitted."""
    count = 0
    for _ in range(tries):
        with contextlib.suppress(RateLimited):
            await quotas.take(wanted, amount)
            count += 1
    return count


async def test_a_minutes_worth_may_come_at_once_and_not_one_more(quotas):
    lefts = [(await quotas.take([REQUESTS], 1))[0].remaining for _ in range(5)]
    assert lefts == [4, 3, 2, 1, 0]
    with pytest.raises(RateLimited) as caught:
        await quotas.take([REQUESTS], 1)
    assert 0 < caught.value.retry_after_s <= 12
    assert (caught.value.quota, caught.value.resource) == ("key k", "requests")


async def test_where_one_quota_is_used_up_nothing_is_taken_of_the_other(quotas):
    assert await admitted(quotas, [REQUESTS, TENANT]) == 3
    assert await admitted(quotas, [REQUESTS]) == 2


async def test_the_subjects_and_what_is_counted_are_kept_apart(quotas):
    assert await admitted(quotas, [REQUESTS]) == 5
    assert await admitted(quotas, [TENANT]) == 3
    assert await admitted(quotas, [TOKENS], amount=20) == 3


async def test_what_was_spent_is_missing_from_the_next_request_on(quotas):
    quotas.spend([TOKENS], 50)
    with pytest.raises(RateLimited):
        await quotas.take([TOKENS], 20)
    (left,) = await quotas.take([TOKENS], 10)
    assert left.remaining == 0


async def test_an_overdrawn_quota_admits_nothing_until_it_is_paid_back(quotas):
    quotas.spend([TOKENS], 600)
    with pytest.raises(RateLimited) as caught:
        await quotas.take([TOKENS], 1)
    assert caught.value.retry_after_s > 500


async def test_what_is_given_back_can_be_used_again_and_no_more(quotas):
    await quotas.take([TOKENS], 60)
    quotas.spend([TOKENS], -1000)
    assert (await quotas.take([TOKENS], 60))[0].remaining == 0


async def test_a_request_above_the_whole_quota_is_told_that_waiting_is_no_use(quotas):
    with pytest.raises(RateLimited, match="this request alone needs 61") as caught:
        await quotas.take([TOKENS], 61)
    assert caught.value.retry_after_s is None


async def test_of_many_requests_at_once_no_more_are_admitted_than_there_is_room_for(quotas):
    results = await asyncio.gather(
        *(quotas.take([REQUESTS], 1) for _ in range(40)), return_exceptions=True
    )
    assert sum(not isinstance(each, Exception) for each in results) == 5


# --- Redis alone ---------------------------------------------------------------------------------


async def test_gateways_share_a_quota(redis):
    redis.say("FLUSHALL")
    async with gateway(redis) as one, gateway(redis) as two:
        assert await admitted(one, [REQUESTS], tries=3) == 3
        assert await admitted(two, [REQUESTS]) == 2
        assert await admitted(one, [REQUESTS]) == 0


async def test_what_one_gateway_spends_another_one_sees(redis):
    redis.say("FLUSHALL")
    async with gateway(redis) as one, gateway(redis) as two:
        one.spend([TOKENS], 60)
        async with asyncio.timeout(20):
            while True:
                try:
                    (left,) = await two.take([TOKENS], 0)
                except RateLimited:
                    return
                if left.remaining <= 1:
                    return
                await asyncio.sleep(0.02)


@pytest.mark.parametrize("how", ["freeze", "kill"])
async def test_without_redis_each_gateway_goes_on_from_what_was_left(redis, how):
    redis.say("FLUSHALL")
    async with gateway(redis, RedisConfig(timeout_s=0.3)) as quotas:
        assert await admitted(quotas, [REQUESTS], tries=3) == 3
        getattr(redis, how)()
        try:
            assert await admitted(quotas, [REQUESTS]) == 2
        finally:
            redis.thaw() if how == "freeze" else redis.start()


async def test_a_full_redis_refuses_nobody_whom_the_quota_admits(redis):
    redis.say("FLUSHALL")
    async with gateway(redis) as quotas:
        assert await admitted(quotas, [REQUESTS], tries=1) == 1
        redis.say("CONFIG", "SET", "maxmemory", "1")
        try:
            assert await admitted(quotas, [REQUESTS]) == 4
        finally:
            redis.say("CONFIG", "SET", "maxmemory", "0")


async def test_a_read_only_redis_refuses_nobody_whom_the_quota_admits(redis):
    redis.say("FLUSHALL")
    async with gateway(redis) as quotas:
        assert await admitted(quotas, [REQUESTS], tries=1) == 1
        redis.say("REPLICAOF", "127.0.0.1", "1")
        try:
            assert await admitted(quotas, [REQUESTS]) == 4
        finally:
            redis.say("REPLICAOF", "NO", "ONE")


async def test_an_emptied_redis_fills_the_buckets_and_nothing_else(redis):
    redis.say("FLUSHALL")
    async with gateway(redis) as quotas:
        assert await admitted(quotas, [REQUESTS]) == 5
        redis.say("FLUSHALL")
        assert await admitted(quotas, [REQUESTS]) == 5


@pytest.mark.parametrize(
    ("level", "at"),
    [("nan", "0"), ("inf", "0"), ("-inf", "1"), ("abc", "def"), ("1e300", "0"), ("5", "1e300")],
)
async def test_a_level_that_is_none_is_a_full_bucket_at_most(redis, level, at):
    redis.say("FLUSHALL")
    redis.say("HSET", "tandem:quota:key k:requests", "level", level, "at", at)
    async with gateway(redis) as quotas:
        assert await admitted(quotas, [REQUESTS]) == 5


async def test_a_key_of_another_type_costs_the_sharing_and_not_the_request(redis):
    redis.say("FLUSHALL")
    redis.say("SET", "tandem:quota:key k:requests", "x")
    async with gateway(redis) as quotas:
        assert await admitted(quotas, [REQUESTS]) == 5
