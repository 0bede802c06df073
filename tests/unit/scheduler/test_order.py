"""The queue gives everybody a turn: by priority, by shares, by deadline, and none is starved."""

from collections import Counter
from dataclasses import replace
from itertools import islice

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from core.messages import TransferId
from scheduler.order import HORIZON_S, RequestQueue
from scheduler.view import Waiting

AGEING_S = 10.0


def waiting(name, *, tenant="", priority=0, at=0.0, deadline=1000.0, cost=10.0, attempt=1):
    return Waiting(
        transfer=TransferId(request_id=str(name), attempt=attempt),
        prompt_tokens=10,
        max_new_tokens=10,
        deadline_s=deadline,
        enqueued_s=at,
        tenant=tenant,
        priority=priority,
        cost=cost,
    )


def queue_of(*requests):
    made = RequestQueue(ageing_s=AGEING_S)
    for each in requests:
        made.add(each)
    return made


def names(queue, **how):
    return [each.transfer.request_id for each in queue.in_order(**how)]


def test_equals_are_served_as_they_came():
    assert names(queue_of(waiting("a", at=0.0), waiting("b", at=1.0))) == ["a", "b"]


def test_the_lower_priority_value_goes_first_and_who_lost_a_placement_before_all():
    queue = queue_of(
        waiting("later", priority=1),
        waiting("usual"),
        waiting("urgent", priority=-5),
        waiting("again", priority=9, attempt=2),
    )
    assert names(queue) == ["again", "urgent", "usual", "later"]


def test_among_a_tenants_own_the_nearest_deadline_goes_first():
    queue = queue_of(waiting("far", deadline=50.0), waiting("near", deadline=20.0, at=1.0))
    assert names(queue) == ["near", "far"]


def test_a_deadline_far_off_does_not_let_newcomers_by_for_ever():
    queue = queue_of(
        waiting("old", deadline=1e6), waiting("new", at=HORIZON_S - 4, deadline=HORIZON_S + 1)
    )
    assert names(queue) == ["old", "new"]


def test_a_tenant_that_floods_does_not_push_back_another():
    flood = [waiting(f"f{n}", tenant="flood") for n in range(100)]
    queue = queue_of(*flood, waiting("g0", tenant="guest", at=1.0), waiting("g1", tenant="guest"))
    assert set(names(queue)[:4]) == {"f0", "g0", "f1", "g1"}


def test_impatience_gives_no_tenant_a_larger_share():
    pushy = [waiting(f"p{n}", tenant="pushy", deadline=1.0) for n in range(9)]
    patient = [waiting(f"q{n}", tenant="patient") for n in range(9)]
    order = names(queue_of(*pushy, *patient))
    assert sorted(name[0] for name in order[:8]) == ["p"] * 4 + ["q"] * 4


def test_shares_are_of_work_and_not_of_requests():
    large = [waiting(f"l{n}", tenant="large", cost=90.0) for n in range(9)]
    small = [waiting(f"s{n}", tenant="small", cost=10.0) for n in range(90)]
    order = names(queue_of(*large, *small))
    assert 8 <= sum(1 for name in order[:20] if name[0] == "s") <= 19
    assert sum(1 for name in order[:50] if name[0] == "l") == 5


def test_who_comes_back_from_idleness_has_saved_nothing_up():
    queue = queue_of(*(waiting(f"a{n}", tenant="a") for n in range(40)))
    for n in range(20):
        queue.remove(TransferId(request_id=f"a{n}", attempt=1), served=True)
    for n in range(20):
        queue.add(waiting(f"b{n}", tenant="b"))
    order = names(queue)
    assert sorted(name[0] for name in order[:10]) == ["a"] * 5 + ["b"] * 5


def test_what_has_waited_long_enough_is_of_the_level_above():
    queue = queue_of(waiting("low", priority=3, at=0.0), waiting("high", at=0.0))
    queue.age(AGEING_S - 0.1)
    queue.remove(TransferId(request_id="high", attempt=1), served=True)
    queue.add(waiting("high again", at=AGEING_S - 0.1))
    assert names(queue) == ["high again", "low"]
    queue.age(AGEING_S)
    assert names(queue) == ["low", "high again"]


def test_age_alone_lifts_nobody_above_those_who_wait():
    """A tenant that floods does not grow into a class of its own."""
    flood = [waiting(f"f{n}", tenant="flood") for n in range(50)]
    queue = queue_of(*flood)
    queue.age(1000.0)
    queue.add(waiting("guest", tenant="guest", at=1000.0))
    assert "guest" in names(queue)[:2]


def test_a_deadline_that_passed_is_found_wherever_it_stands():
    queue = queue_of(*(waiting(n, deadline=100.0 - n) for n in range(50)))
    assert {each.transfer.request_id for each in queue.expired(52.0)} == {"48", "49"}
    queue.remove(TransferId(request_id="49", attempt=1))
    assert [each.transfer.request_id for each in queue.expired(52.0)] == ["48"]


def test_some_tenants_can_be_left_out():
    queue = queue_of(waiting("a", tenant="a"), waiting("b", tenant="b"), waiting("c", tenant="a"))
    assert names(queue, without=frozenset({"a"})) == ["b"]


def test_what_is_ahead_of_a_newcomer_is_its_own_tenants_and_as_much_of_each_other():
    queue = queue_of(
        *(waiting(f"f{n}", tenant="flood", cost=100.0) for n in range(50)),
        waiting("g", tenant="guest", cost=100.0),
    )
    assert queue.cost == 5100.0
    assert queue.ahead_of(waiting("n", tenant="new", cost=100.0)) == 200.0
    assert queue.ahead_of(waiting("n", tenant="guest", cost=100.0)) == 300.0
    assert queue.ahead_of(waiting("n", tenant="flood", cost=100.0)) == 5100.0
    assert queue.ahead_of(waiting("n", tenant="new", priority=1)) == 5100.0
    assert queue.ahead_of(waiting("n", tenant="new", priority=-1)) == 0.0


arrivals = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c"]),
        st.integers(-2, 2),
        st.floats(0.0, 100.0),
        st.floats(0.1, 500.0),
        st.floats(1.0, 1000.0),
    ),
    max_size=60,
)


@given(arrivals, st.randoms(use_true_random=False))
def test_the_order_is_what_serving_one_by_one_gives(rows, random):
    """`in_order` looks ahead without changing anything, and is right about what comes."""
    rows = sorted(rows, key=lambda row: row[2])
    queue = RequestQueue(ageing_s=AGEING_S)
    for number, (tenant, priority, at, patience, cost) in enumerate(rows):
        queue.age(at)
        queue.add(
            waiting(
                number, tenant=tenant, priority=priority, at=at, deadline=at + patience, cost=cost
            )
        )
        if random.random() < 0.2:
            queue.remove(TransferId(request_id=str(random.randrange(number + 1)), attempt=1))
    foreseen = names(queue)
    assert foreseen == names(queue)
    assert sorted(foreseen) == sorted(str(t.request_id) for t in queue._entries)
    served = []
    while len(queue):
        first = next(queue.in_order())
        served.append(first.transfer.request_id)
        queue.remove(first.transfer, served=True)
    assert served == foreseen


@given(
    st.lists(st.tuples(st.integers(-3, 3), st.sampled_from(["a", "b"])), min_size=1, max_size=6),
    st.integers(0, 3),
    st.sampled_from(["a", "b", "c"]),
)
def test_nobody_starves_whatever_keeps_coming(stream, priority, tenant):
    """One request a second is served, and as many come, of any priority and tenant."""
    queue = queue_of(waiting("patient", tenant=tenant, priority=priority, at=0.0))
    levels = len({each for each, _ in stream} | {priority})
    bound_s = levels * AGEING_S + HORIZON_S + 2 * len(stream) + 10
    for second in range(int(bound_s) + 1):
        for each, owner in stream[:1] if second % 2 else stream[-1:]:
            queue.add(waiting(f"n{second}", tenant=owner, priority=each, at=float(second)))
        queue.age(float(second))
        first = next(queue.in_order())
        queue.remove(first.transfer, served=True)
        if first.transfer.request_id == "patient":
            return
    raise AssertionError(f"it still waits after {bound_s} s")


class QueueMachine(RuleBasedStateMachine):
    """Whatever happens, the queue's books agree with what is in it."""

    def __init__(self):
        super().__init__()
        self.queue = RequestQueue(ageing_s=AGEING_S)
        self.model = {}
        self.now = 0.0
        self.number = 0

    @rule(tenant=st.sampled_from("abcd"), priority=st.integers(-1, 1), patience=st.floats(0.1, 90))
    def add(self, tenant, priority, patience):
        self.number += 1
        each = waiting(
            self.number,
            tenant=tenant,
            priority=priority,
            at=self.now,
            deadline=self.now + patience,
            attempt=1 + (self.number % 7 == 0),
        )
        self.queue.add(each)
        self.model[each.transfer] = each

    @precondition(lambda self: self.model)
    @rule(data=st.data(), served=st.booleans())
    def remove(self, data, served):
        transfer = data.draw(st.sampled_from(sorted(self.model, key=str)))
        assert self.queue.remove(transfer, served=served) == self.model.pop(transfer)
        assert self.queue.remove(transfer) is None

    @rule(passed=st.floats(0.0, 15.0))
    def wait(self, passed):
        self.now += passed
        self.queue.age(self.now)

    @precondition(lambda self: self.model)
    @rule()
    def serve(self):
        first = next(self.queue.in_order())
        del self.model[first.transfer]
        self.queue.remove(first.transfer, served=True)

    @rule(tenant=st.sampled_from("abc"), priority=st.integers(-1, 1))
    def displace(self, tenant, priority):
        newcomer = waiting("newcomer", tenant=tenant, priority=priority, at=self.now)
        victim = self.queue.displaced_by(newcomer)
        if victim is not None:
            assert self.model[victim.transfer] == victim and victim.transfer.attempt == 1
            counts = Counter(
                each.tenant for each in self.model.values() if each.transfer.attempt == 1
            )
            assert counts[victim.tenant] == max(counts.values()) > counts[tenant] + 1
            self.queue.remove(victim.transfer)
            del self.model[victim.transfer]

    @invariant()
    def holds_what_was_put_in(self):
        assert len(self.queue) == len(self.model)
        assert {each.transfer for each in self.queue.in_order()} == set(self.model)
        expired = {each.transfer for each in self.queue.expired(self.now)}
        assert expired == {t for t, each in self.model.items() if each.deadline_s <= self.now}
        first_time = [each.cost for each in self.model.values() if each.transfer.attempt == 1]
        assert abs(self.queue.cost - sum(first_time)) < 1e-6


TestQueueMachine = QueueMachine.TestCase


def test_in_a_full_queue_the_last_of_the_largest_tenant_makes_room_for_a_smaller_one():
    flood = [waiting(f"f{n}", tenant="flood", at=float(n)) for n in range(4)]
    queue = queue_of(*flood, waiting("g0", tenant="guest", at=9.0))
    assert queue.displaced_by(waiting("g1", tenant="guest")) is flood[3]
    assert queue.displaced_by(waiting("n", tenant="new")) is flood[3]
    assert queue.displaced_by(waiting("f9", tenant="flood")) is None


def test_tenants_with_as_many_waiting_displace_nobody():
    pair = queue_of(waiting("a0", tenant="a"), waiting("a1", tenant="a"), waiting("b0", tenant="b"))
    assert pair.displaced_by(waiting("b1", tenant="b")) is None
    assert queue_of().displaced_by(waiting("a")) is None


def test_a_newcomer_displaces_nothing_more_urgent_and_nothing_that_lost_a_placement():
    urgent = [waiting(f"u{n}", tenant="flood", priority=-1) for n in range(3)]
    assert queue_of(*urgent).displaced_by(waiting("g", tenant="guest")) is None
    again = [waiting(f"a{n}", tenant="flood", attempt=2) for n in range(3)]
    assert queue_of(*again).displaced_by(waiting("g", tenant="guest")) is None
    idle = waiting("idle", tenant="flood", priority=3)
    mixed = queue_of(idle, *urgent, *(waiting(f"f{n}", tenant="flood") for n in range(3)))
    assert mixed.displaced_by(waiting("g", tenant="guest")) is idle


def test_a_request_that_is_announced_again_stands_in_the_queue_once():
    queue = queue_of(waiting("a"), waiting("b"))
    queue.add(replace(waiting("a"), priority=1))
    assert names(queue) == ["b", "a"]


def test_looking_at_the_head_of_a_long_queue_does_not_walk_it():
    queue = queue_of(*(waiting(n, tenant=f"t{n % 500}") for n in range(20_000)))
    looked = 0

    class Counted(dict):
        def __getitem__(self, key):
            nonlocal looked
            looked += 1
            return super().__getitem__(key)

    queue._service = Counted(queue._service)
    assert len(list(islice(queue.in_order(), 3))) == 3
    assert looked < 20
