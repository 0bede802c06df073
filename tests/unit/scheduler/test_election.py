"""Who leads when leaders die, stores are lost and tokens are forgotten."""

import asyncio

import pytest

from core.errors import StoreAway
from core.messages import Standby, Welcome, WorkerRef
from core.store.lease import Candidate, MemoryLeases
from core.stream import Outbox
from protos.tandem.internal.v1 import scheduler_pb2
from scheduler.election import Election
from scheduler.leadership import Leadership

LEASE_S = 2.0


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


class Store(MemoryLeases):
    """A store that can be lost, for all or for one."""

    def __init__(self, clock):
        super().__init__(clock)
        self.lost_to = set()

    async def take(self, candidate, *, at_least, ttl_s):
        if candidate.holder in self.lost_to:
            raise StoreAway("lost")
        return await super().take(candidate, at_least=at_least, ttl_s=ttl_s)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def store(clock):
    return Store(clock)


def election(store, name, *, alone=False):
    made = Election(
        store,
        Candidate(holder=f"{name}/1", address=f"unix:/{name}"),
        lease_s=LEASE_S,
        alone=alone,
        on_term=lambda token: terms.append(token),
    )
    terms = made.terms = []
    return made


async def test_the_first_leads_and_the_other_stands_by_and_knows_for_whom(store):
    one, two = election(store, "one"), election(store, "two")
    await one.step()
    await two.step()
    assert (one.leads, two.leads) == (True, False)
    assert two.leader.leader.holder == "one/1"
    assert one.terms == [1]


async def test_a_standby_takes_over_once_the_lease_has_ended_and_not_before(store, clock):
    one, two = election(store, "one"), election(store, "two")
    await one.step()
    clock.now_s += LEASE_S - 0.01
    await two.step()
    assert not two.leads
    clock.now_s += 0.02
    await two.step()
    assert two.token > one.token
    await one.step()  # it was only frozen
    assert not one.leads
    assert one.terms == [1, 0]


async def test_renewing_is_no_new_term(store):
    one = election(store, "one")
    for _ in range(5):
        await one.step()
    assert (one.terms, one.num_terms) == ([1], 1)


async def test_without_a_store_the_leader_goes_on_and_the_standby_does_not_begin(store, clock):
    one, two = election(store, "one"), election(store, "two")
    await one.step()
    await two.step()
    store.lost_to = {"one/1", "two/1"}
    clock.now_s += 100 * LEASE_S
    await one.step()
    await two.step()
    assert (one.leads, two.leads) == (True, False)
    store.lost_to = set()
    await one.step()
    assert one.leads


async def test_a_leader_cut_off_from_the_store_gives_way_to_the_token_of_the_next(store, clock):
    one, two = election(store, "one"), election(store, "two")
    await one.step()
    store.lost_to = {"one/1"}
    clock.now_s += 2 * LEASE_S
    await two.step()
    await one.step()
    assert (one.leads, two.leads) == (True, True)  # until somebody tells it
    assert two.token > one.token
    one.heard(two.token)
    await one.step()
    assert not one.leads


async def test_the_only_scheduler_leads_without_a_store(store):
    one = election(store, "one", alone=True)
    store.lost_to = {"one/1"}
    await one.step()
    assert one.token == 1
    one.heard(7)  # of workers that have seen its earlier lives
    await one.step()
    assert one.token == 8


async def test_of_two_schedulers_none_begins_without_a_store(store):
    one = election(store, "one")
    store.lost_to = {"one/1"}
    await one.step()
    assert not one.leads


async def test_a_leader_that_hears_a_higher_token_surpasses_it_where_the_lease_is_its_own(store):
    one = election(store, "one")
    await one.step()
    one.heard(57)  # the store was emptied, and counted from one again
    await one.step()
    assert one.token == 58
    assert one.terms == [1, 58]


async def test_a_leader_that_stops_frees_the_lease_at_once(store):
    one, two = election(store, "one"), election(store, "two")
    running = asyncio.create_task(one.run())
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait({running})
    await two.step()
    assert two.leads


# --- the streams ----------------------------------------------------------------------------------


class Said(Outbox):
    """Remembers what was sent."""

    def __init__(self):
        super().__init__(scheduler_pb2.RegisterResponse)
        self.said = []

    def send(self, obj):
        self.said.append(obj)
        return super().send(obj)


def test_a_scheduler_that_stands_by_says_who_leads_and_ends_the_stream():
    leadership = Leadership(WorkerRef(name="s", incarnation="1"), leads=False)
    outbox = Said()
    assert not leadership.greets(outbox, 0)
    assert outbox.said == [Standby()]
    assert not outbox.send(Standby())  # closed


async def test_a_leader_that_is_replaced_sends_its_clients_to_the_next(store):
    leadership = Leadership(WorkerRef(name="s", incarnation="1"), leads=False)
    leadership.begin(3)
    outbox = Said()
    assert leadership.greets(outbox, 0)
    leadership.begin(5)
    await store.take(Candidate(holder="t/1", address="unix:/t"), at_least=5, ttl_s=1)
    leadership.end(await store.read())
    assert outbox.said == [
        Welcome(scheduler="s/1", leader_token=3),
        Welcome(scheduler="s/1", leader_token=5),
        Standby(leader_address="unix:/t", leader_token=6),
    ]


def test_what_clients_have_seen_is_passed_on():
    heard = []
    leadership = Leadership(WorkerRef(name="s", incarnation="1"))
    leadership.on_heard = heard.append
    leadership.greets(Said(), 12)
    assert heard == [12]
