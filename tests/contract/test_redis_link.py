"""A Redis that is frozen, full, read-only, flushed or dead fails calls soon, and nothing else."""

import asyncio
import time

import pytest

from core.config import RedisConfig
from core.errors import ConfigError, StoreAway
from core.store.lease import Candidate
from core.store.redis_lease import RedisLeases
from core.store.redis_link import RedisLink

ME = Candidate(holder="scheduler/1", address="unix:/run/one.sock")
# Of calls while the breaker is open: none of them waits for anything.
MANY = 2000


@pytest.fixture
async def link(redis):
    redis.say("FLUSHALL")
    link = RedisLink(redis.url, RedisConfig(timeout_s=0.2))
    running = asyncio.create_task(link.run())
    yield link
    running.cancel()
    await asyncio.wait({running})


async def answers(link):
    """Until Redis answers again."""
    async with asyncio.timeout(20):
        while True:
            try:
                return await link.call("ping", lambda client: client.ping())
            except StoreAway:
                await asyncio.sleep(0.02)


async def fails(link):
    with pytest.raises(StoreAway):
        await link.call("ping", lambda client: client.ping())


async def test_a_frozen_redis_costs_one_timeout_and_then_nothing(redis, link):
    await answers(link)
    redis.freeze()
    try:
        await fails(link)
        assert link.away
        made = link.num_calls["ping"]
        for _ in range(MANY):
            await fails(link)
        assert link.num_calls["ping"] == made  # none of them was sent, so none waited
    finally:
        redis.thaw()
    assert await answers(link)


async def test_a_dead_redis_is_found_again_when_it_is_back(redis, link):
    await answers(link)
    redis.kill()
    await fails(link)
    assert link.away
    redis.start()
    assert await answers(link)


async def test_calls_that_wait_together_for_a_frozen_redis_fail_together(redis, link):
    await answers(link)
    redis.freeze()
    try:
        began_s = time.monotonic()
        await asyncio.gather(*(fails(link) for _ in range(200)))
        assert time.monotonic() - began_s < 200 * 0.2 / 4  # not one after another
    finally:
        redis.thaw()
    await answers(link)


async def test_a_full_redis_still_renews_a_lease_and_opens_no_breaker(redis, link):
    leases = RedisLeases(link, bytes(32))
    held = await leases.take(ME, at_least=0, ttl_s=60)
    redis.say("CONFIG", "SET", "maxmemory", "1")
    redis.say("CONFIG", "SET", "maxmemory-policy", "noeviction")
    try:
        assert await leases.take(ME, at_least=0, ttl_s=60) == held
        with pytest.raises(StoreAway):
            await link.call("set", lambda client: client.set("tandem:x", "y"))
        assert link.num_failures["set", "refused"] == 1
        assert not link.away
    finally:
        redis.say("CONFIG", "SET", "maxmemory", "0")
    assert await link.call("set", lambda client: client.set("tandem:x", "y"))


async def test_a_read_only_replica_refuses_writes_and_still_tells_who_leads(redis, link):
    leases = RedisLeases(link, bytes(32))
    held = await leases.take(ME, at_least=0, ttl_s=60)
    redis.say("REPLICAOF", "127.0.0.1", "1")
    try:
        with pytest.raises(StoreAway):
            await leases.take(ME, at_least=0, ttl_s=60)
        assert await leases.read() == held
        assert not link.away
    finally:
        redis.say("REPLICAOF", "NO", "ONE")
    assert await leases.take(ME, at_least=0, ttl_s=60) == held


async def test_a_flushed_redis_forgets_the_leader_and_nothing_fails(redis, link):
    leases = RedisLeases(link, bytes(32))
    await leases.take(ME, at_least=0, ttl_s=60)
    redis.say("FLUSHALL")
    redis.say("SCRIPT", "FLUSH")
    assert await leases.read() is None
    assert (await leases.take(ME, at_least=1, ttl_s=60)).token == 2


async def test_whoever_is_cancelled_in_a_call_leaves_the_link_usable(redis, link):
    await answers(link)
    redis.freeze()
    calling = asyncio.create_task(link.call("ping", lambda client: client.ping()))
    await asyncio.sleep(0)
    calling.cancel()
    await asyncio.wait({calling})
    redis.thaw()
    assert calling.cancelled()
    assert await answers(link)


@pytest.mark.parametrize("url", ["", "http://x", "redis://[", "redis://h:port", "localhost:6379"])
def test_a_url_that_is_none_is_refused_without_being_quoted(url):
    with pytest.raises(ConfigError, match=r"redis\.url is not") as caught:
        RedisLink(url, RedisConfig())
    assert not url or url not in caught.value.message
