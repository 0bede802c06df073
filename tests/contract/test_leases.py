"""One leader, under a token that only grows, in memory and in Redis alike."""

import asyncio
import contextlib

import pytest

from core.config import RedisConfig
from core.errors import StoreAway
from core.store.lease import Candidate, MemoryLeases
from core.store.redis_lease import RedisLeases
from core.store.redis_link import RedisLink

SECRET = bytes(32)
ONE = Candidate(holder="scheduler/1", address="unix:/run/one.sock", admin_address="[::1]:8001")
TWO = Candidate(holder="scheduler-1/2", address="unix:/run/two.sock")
LONG_S = 60.0
# A loaded machine is no dead Redis.
PATIENT = RedisConfig(timeout_s=5.0)


@contextlib.asynccontextmanager
async def linked(server, config=PATIENT):
    link = RedisLink(server.url, config)
    running = asyncio.create_task(link.run())
    try:
        yield link
    finally:
        running.cancel()
        await asyncio.wait({running})


@pytest.fixture(params=["memory", "redis"])
async def leases(request):
    if request.param == "memory":
        yield MemoryLeases()
        return
    server = request.getfixturevalue("redis")
    server.say("FLUSHALL")
    async with linked(server) as link:
        yield RedisLeases(link, SECRET)


@pytest.fixture
async def stored(redis):
    """A lease in a Redis that a test may write to."""
    redis.say("FLUSHALL")
    async with linked(redis) as link:
        yield redis, link, RedisLeases(link, SECRET)


async def test_who_comes_first_leads_and_others_are_told_who_does(leases):
    first = await leases.take(ONE, at_least=0, ttl_s=LONG_S)
    assert (first.token, first.leader) == (1, ONE)
    assert await leases.take(TWO, at_least=0, ttl_s=LONG_S) == first
    assert await leases.read() == first


async def test_renewing_keeps_the_token(leases):
    first = await leases.take(ONE, at_least=0, ttl_s=LONG_S)
    assert await leases.take(ONE, at_least=first.token, ttl_s=LONG_S) == first


async def test_a_new_leader_has_a_higher_token(leases):
    first = await leases.take(ONE, at_least=0, ttl_s=LONG_S)
    await leases.release(ONE)
    second = await leases.take(TWO, at_least=0, ttl_s=LONG_S)
    assert second.leader == TWO
    assert second.token > first.token


async def test_a_lease_that_is_not_renewed_ends(leases):
    await leases.take(ONE, at_least=0, ttl_s=0.02)
    async with asyncio.timeout(10):
        while True:
            if (await leases.take(TWO, at_least=0, ttl_s=LONG_S)).leader == TWO:
                return
            await asyncio.sleep(0.005)


async def test_another_cannot_release_it(leases):
    first = await leases.take(ONE, at_least=0, ttl_s=LONG_S)
    await leases.release(TWO)
    assert await leases.read() == first


async def test_a_free_lease_is_read_as_none(leases):
    assert await leases.read() is None


async def test_a_token_surpasses_what_others_have_seen_also_ones_own(leases):
    assert (await leases.take(ONE, at_least=41, ttl_s=LONG_S)).token == 42
    assert (await leases.take(ONE, at_least=50, ttl_s=LONG_S)).token == 51


async def test_of_many_that_try_at_once_one_leads(leases):
    candidates = [Candidate(holder=f"s/{i}", address="unix:/x") for i in range(20)]
    got = await asyncio.gather(*(leases.take(c, at_least=0, ttl_s=LONG_S) for c in candidates))
    assert len({lease.leader.holder for lease in got}) == 1


# --- Redis alone ---------------------------------------------------------------------------------


async def test_a_flushed_redis_gives_no_token_twice(stored):
    redis, _, leases = stored
    first = await leases.take(ONE, at_least=0, ttl_s=LONG_S)
    redis.say("FLUSHALL")
    again = await leases.take(TWO, at_least=first.token, ttl_s=LONG_S)
    assert again.token > first.token


FORGED = (
    '{"token":99,"holder":"scheduler/9","address":"unix:/evil.sock","mac":"00"}',
    '{"token":99,"holder":"scheduler/1","address":"unix:/run/one.sock"}',
    '{"token":99,"holder":"s/9","address":"x:1","admin":"http://evil/","mac":"00"}',
    '{"token":1e300,"holder":"scheduler/9","address":"x:1","mac":""}',
    '{"token":-1,"holder":7,"address":[],"mac":{}}',
    '{"token":"1","holder":"scheduler/9"}',
    "[]",
    "[" * 2000,
    "null",
    "\x80\x04K\x01.",  # what a pickle looks like
    "x" * 100_000,
)


@pytest.mark.parametrize("forged", FORGED, ids=range(len(FORGED)))
async def test_a_record_that_no_scheduler_wrote_is_told_to_nobody_and_swept_away(stored, forged):
    redis, link, leases = stored
    redis.say("SET", "tandem:leader", forged)
    assert await leases.read() is None
    lease = await leases.take(ONE, at_least=7, ttl_s=LONG_S)
    assert (lease.leader, lease.token > 7) == (ONE, True)
    assert await leases.read() == lease
    assert sum(n for (_, kind), n in link.num_failures.items() if kind == "invalid") > 0


@pytest.mark.parametrize("counter", ["nan", "inf", "-5", "1e99", "abc", "9999999999999999"])
async def test_a_counter_that_is_none_costs_no_token_its_order(stored, counter):
    redis, _, leases = stored
    redis.say("SET", "tandem:leader:token", counter)
    assert (await leases.take(ONE, at_least=7, ttl_s=LONG_S)).token == 8


async def test_a_key_of_another_type_is_a_failed_call_and_not_a_dead_redis(stored):
    redis, link, leases = stored
    redis.say("RPUSH", "tandem:leader", "a")
    with pytest.raises(StoreAway):
        await leases.take(ONE, at_least=0, ttl_s=LONG_S)
    assert not link.away
    assert link.num_failures["lease_take", "refused"] == 1


async def test_of_a_cluster_with_another_secret_nothing_is_believed(stored):
    _, link, leases = stored
    await leases.take(ONE, at_least=0, ttl_s=LONG_S)
    assert await RedisLeases(link, b"another secret").read() is None
