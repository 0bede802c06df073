"""What a request is charged, and what it gets back."""

import pytest

from core.errors import DataLoss, InvalidRequest, Overloaded, RateLimited, Unavailable
from core.messages import StopReason
from gateway.backend import TokenBatch
from gateway.caller import ANONYMOUS, Caller
from gateway.limits import MemoryQuotas, Quota, Resource
from gateway.metering import Meter
from gateway.request_record import RequestRecord

TOKENS = Quota(subject="key k", resource=Resource.TOKENS, per_minute=100)
REQUESTS = Quota(subject="key k", resource=Resource.REQUESTS, per_minute=2)
TENANT = Quota(subject="tenant t", resource=Resource.TOKENS, per_minute=1000)


class Stream:
    """Two batches, and a failure behind them where it is given one."""

    def __init__(self, failure=None):
        self._failure = failure
        self.stops = []

    async def __aiter__(self):
        yield TokenBatch(token_ids=(1, 2, 3))
        yield TokenBatch(token_ids=(4,))
        if self._failure is not None:
            raise self._failure

    def stop(self, reason, choice=None):
        self.stops.append(reason)


@pytest.fixture
def store():
    return MemoryQuotas(clock=lambda: 0.0)


@pytest.fixture
def meter(store):
    return Meter(store)


def record(*quotas):
    return RequestRecord(caller=Caller(key_id="k", tenant="t", quotas=quotas))


async def left(store, quota=TOKENS):
    (allowance,) = await store.take([quota], 0)
    return allowance.remaining


async def test_prompt_and_answer_are_charged_to_key_and_tenant(meter, store):
    async with meter.prompt(record(TOKENS, TENANT, REQUESTS), 10) as charge:
        assert await left(store) == 90
        async for _ in charge.metered(Stream()):
            pass
    assert await left(store) == 86
    assert await left(store, TENANT) == 986


async def test_the_tightest_quota_is_what_a_client_is_told(meter):
    asked = record(TENANT, TOKENS, REQUESTS)
    await meter.request(asked)
    async with meter.prompt(asked, 10):
        pass
    assert [each.quota for each in asked.allowances] == [REQUESTS, TOKENS]


@pytest.mark.parametrize("failure", [Overloaded("full"), Unavailable("away"), ValueError("ours")])
async def test_what_fails_for_the_servers_sake_before_its_first_token_is_free(
    meter, store, failure
):
    with pytest.raises(type(failure)):
        async with meter.prompt(record(TOKENS), 10):
            raise failure
    assert await left(store) == 100


async def test_what_the_client_got_wrong_is_not(meter, store):
    with pytest.raises(InvalidRequest):
        async with meter.prompt(record(TOKENS), 10):
            raise InvalidRequest("no")
    assert await left(store) == 90


async def test_what_fails_behind_its_first_token_is_not(meter, store):
    with pytest.raises(DataLoss):
        async with meter.prompt(record(TOKENS), 10) as charge:
            async for _ in charge.metered(Stream(DataLoss("bad"))):
                pass
    assert await left(store) == 86


async def test_a_request_that_is_refused_is_charged_nothing(meter, store):
    with pytest.raises(RateLimited):
        async with meter.prompt(record(TOKENS), 101):
            raise AssertionError("it was let in")
    assert await left(store) == 100


async def test_each_request_counts_until_none_is_left(meter):
    for _ in range(2):
        await meter.request(record(REQUESTS))
    with pytest.raises(RateLimited):
        await meter.request(record(REQUESTS))


async def test_without_quotas_nothing_stands_in_between(meter):
    stream = Stream()
    asked = RequestRecord(caller=ANONYMOUS)
    await meter.request(asked)
    async with meter.prompt(asked, 10**9) as charge:
        assert charge.metered(stream) is stream
    assert asked.allowances == ()


async def test_a_metered_stream_is_stopped_as_the_one_within(meter):
    stream = Stream()
    async with meter.prompt(record(TOKENS), 1) as charge:
        charge.metered(stream).stop(StopReason.STOP_SEQUENCE)
    assert stream.stops == [StopReason.STOP_SEQUENCE]
