"""How far a stream has come is kept whole or not at all, in memory and in Redis alike."""

import asyncio
import contextlib

import pytest

from core.config import RedisConfig
from core.errors import StoreAway
from core.messages import StopReason
from core.store.redis_link import RedisLink
from gateway.journal_store import Append, Head, MemoryJournals, Piece, Verdict
from gateway.redis_journal import RedisJournals

SECRET = bytes(32)
MAX_BYTES = 4096
HEAD = Head(digest="d" * 64, seed=2**62 + 1, created_unix_s=1_700_000_000, num_choices=2)


@contextlib.asynccontextmanager
async def journals(server, timeout_s=5.0):
    link = RedisLink(server.url, RedisConfig(timeout_s=timeout_s))
    running = asyncio.create_task(link.run())
    try:
        made = RedisJournals(link, SECRET, ttl_s=60, max_bytes=MAX_BYTES)
        made.link = link
        yield made
    finally:
        running.cancel()
        await asyncio.wait({running})


@pytest.fixture(params=["memory", "redis"])
async def store(request):
    if request.param == "memory":
        yield MemoryJournals(ttl_s=60, max_bytes=MAX_BYTES)
        return
    server = request.getfixturevalue("redis")
    server.say("FLUSHALL")
    async with journals(server) as made:
        yield made


def append(*pieces, owner="one", begins=False, key="k"):
    return Append(key=key, owner=owner, head=HEAD, pieces=pieces, begins=begins)


def piece(choice, start, *ids, end=None):
    return Piece(choice=choice, start=start, token_ids=ids, end=end)


def told(kept):
    return [(choice.token_ids, choice.end) for choice in kept.choices]


async def test_what_was_appended_is_found_in_order_with_its_head(store):
    first = append(piece(0, 0, 1, 2), piece(1, 0, 9), begins=True)
    assert await store.append([first]) == [Verdict.KEPT]
    more = append(piece(0, 2, 3), piece(1, 1, end=StopReason.EOS))
    assert await store.append([more]) == [Verdict.KEPT]
    kept = await store.find("k")
    assert kept.head == HEAD
    assert told(kept) == [([1, 2, 3], None), ([9], StopReason.EOS)]


async def test_what_is_told_twice_counts_once(store):
    await store.append([append(piece(0, 0, 1, 2), begins=True)])
    await store.append([append(piece(0, 0, 1, 2, 3))])
    assert told(await store.find("k"))[0] == ([1, 2, 3], None)


async def test_a_stream_with_a_gap_is_none(store):
    await store.append([append(piece(0, 0, 1), begins=True)])
    await store.append([append(piece(0, 2, 3))])
    assert await store.find("k") is None


async def test_who_takes_a_stream_over_owns_it_alone(store):
    await store.append([append(piece(0, 0, 1), begins=True)])
    await store.find("k", owner="two")
    assert await store.append([append(piece(0, 1, 2))]) == [Verdict.TAKEN]
    assert await store.append([append(piece(0, 1, 7), owner="two")]) == [Verdict.KEPT]
    assert told(await store.find("k"))[0] == ([1, 7], None)


async def test_looking_takes_nothing_over(store):
    await store.append([append(piece(0, 0, 1), begins=True)])
    await store.find("k")
    assert await store.append([append(piece(0, 1, 2))]) == [Verdict.KEPT]


async def test_a_stream_that_nobody_began_is_gone(store):
    assert await store.append([append(piece(0, 5, 1))]) == [Verdict.GONE]
    assert await store.find("k") is None


async def test_a_stream_that_is_too_long_is_forgotten(store):
    ids = range(100_000, 101_000)
    assert await store.append([append(piece(0, 0, *ids), begins=True)]) == [Verdict.FULL]
    assert await store.find("k") is None


async def test_each_stream_of_many_has_its_own_verdict(store):
    await store.append([append(piece(0, 0, 1), begins=True, key="a")])
    appends = [append(piece(0, 1, 2), key="a"), append(piece(0, 1, 2), key="b")]
    appends += [append(piece(0, 0, 1), key=f"c{i}", begins=True) for i in range(600)]
    verdicts = await store.append(appends)
    assert verdicts == [Verdict.KEPT, Verdict.GONE] + [Verdict.KEPT] * 600


async def test_in_memory_streams_end_and_are_bounded():
    now = [0.0]
    store = MemoryJournals(ttl_s=10, max_bytes=MAX_BYTES, max_streams=3, clock=lambda: now[0])
    for key in "abcd":
        await store.append([append(piece(0, 0, 1), key=key, begins=True)])
    assert await store.find("a") is None
    assert await store.find("d")
    now[0] = 11.0
    assert await store.find("d") is None


# --- Redis alone ---------------------------------------------------------------------------------


async def test_every_key_ends_by_itself(redis):
    redis.say("FLUSHALL")
    async with journals(redis) as store:
        await store.append([append(piece(0, 0, 1), begins=True)])
        for key in ("tandem:stream:k", "tandem:stream:k:log"):
            assert 0 < int(redis.say("TTL", key)[1:]) <= 60


@pytest.mark.parametrize(
    ("field", "forged"),
    [
        ("head", '{"digest":"x","seed":1,"created_unix_s":1,"num_choices":1}'),
        ("head", "0" * 64 + '{"digest":"x","seed":1,"created_unix_s":1,"num_choices":1}'),
        ("head", "\x80\x04K\x01."),
        ("head", "[" * 900),
        ("head", "x" * 100_000),
        ("log", "0" * 64 + "[[0,0,[1],null]]\n"),
        ("log", "ü\n"),
    ],
)
async def test_what_no_gateway_wrote_is_not_served(redis, field, forged):
    redis.say("FLUSHALL")
    async with journals(redis) as store:
        await store.append([append(piece(0, 0, 1), begins=True)])
        if field == "head":
            redis.say("HSET", "tandem:stream:k", "head", forged)
        else:
            redis.say("APPEND", "tandem:stream:k:log", forged)
        assert await store.find("k") is None
        assert store.link.num_failures["journal_find", "invalid"] == 1


async def test_one_streams_lines_are_not_anothers(redis):
    redis.say("FLUSHALL")
    async with journals(redis) as store:
        await store.append([append(piece(0, 0, 1), begins=True)])
        redis.say("COPY", "tandem:stream:k", "tandem:stream:l")
        redis.say("COPY", "tandem:stream:k:log", "tandem:stream:l:log")
        assert await store.find("l") is None


async def test_a_full_redis_refuses_appends_and_serves_what_is_there(redis):
    redis.say("FLUSHALL")
    async with journals(redis) as store:
        await store.append([append(piece(0, 0, 1), begins=True)])
        redis.say("CONFIG", "SET", "maxmemory", "1")
        try:
            assert await store.append([append(piece(0, 1, 2))]) == [Verdict.REFUSED]
            assert told(await store.find("k"))[0] == ([1], None)
        finally:
            redis.say("CONFIG", "SET", "maxmemory", "0")
        assert await store.append([append(piece(0, 1, 2))]) == [Verdict.KEPT]


async def test_a_read_only_redis_refuses_appends(redis):
    redis.say("FLUSHALL")
    async with journals(redis) as store:
        redis.say("REPLICAOF", "127.0.0.1", "1")
        try:
            refused = await store.append([append(piece(0, 0, 1), begins=True)])
            assert refused == [Verdict.REFUSED]
        finally:
            redis.say("REPLICAOF", "NO", "ONE")


async def test_a_frozen_redis_is_an_error_to_who_resumes(redis):
    async with journals(redis, timeout_s=0.2) as store:
        redis.freeze()
        try:
            with pytest.raises(StoreAway):
                await store.find("k")
        finally:
            redis.thaw()
