"""`decide` never promises what is not there, keeps the order of service, and is a function."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.messages import Compatibility, Endpoint, StepCost, TransferId, WorkerRef
from scheduler.choice import BACKLOG_STEPS, WINDOW_S
from scheduler.order import RequestQueue
from scheduler.policy import Disaggregated, Local, Reject, decide, not_ready, refuse_early
from scheduler.view import ClusterView, Rules, Waiting, WorkerView, charge_decode

BLOCK_SIZE = 16
SAME = Compatibility(
    model="m",
    revision="1",
    dtype="bfloat16",
    block_size=BLOCK_SIZE,
    block_bytes=1024,
    layout="l",
    protocol=1,
)


def worker(
    name,
    *,
    blocks=100,
    free=None,
    seqs=0,
    max_seqs=8,
    backlog=0,
    speed=0.0,
    reads=False,
    preempted=0,
    compatibility=SAME,
    busy_until_s=None,
    step_s=0.0,
    cost=None,
    link=0.0,
):
    return WorkerView(
        endpoint=Endpoint(worker=WorkerRef(name=name, incarnation="1"), address=f"unix:{name}"),
        compatibility=compatibility,
        num_blocks=blocks,
        num_free_blocks=blocks if free is None else free,
        max_seqs=max_seqs,
        num_seqs=seqs,
        max_step_tokens=512,
        backlog_tokens=backlog,
        prefill_tokens_per_s=speed,
        local_prefill=reads,
        num_preempted=preempted,
        busy_until_s=busy_until_s,
        step_s=step_s,
        cost=cost,
        link_bytes_per_s=link,
    )


def request(number, *, prompt=20, new=20, choices=1, deadline_s=100.0, excluded=()):
    return Waiting(
        transfer=TransferId(request_id=f"r{number}", attempt=1),
        prompt_tokens=prompt,
        max_new_tokens=new,
        num_choices=choices,
        deadline_s=deadline_s,
        excluded=frozenset(excluded),
        excluded_until_s=10.0,
    )


def cluster(prefills=(), decodes=(), mode="auto", reserve=256):
    rules = Rules(local_prefill=mode, reserve_answer_tokens=reserve)
    return ClusterView(prefills=tuple(prefills), decodes=tuple(decodes), rules=rules)


def where(decision):
    """The names of who reads the prompt and of who decodes."""
    if isinstance(decision, Local):
        return decision.decode.worker.name, decision.decode.worker.name
    return decision.prefill.worker.name, decision.decode.worker.name


workers = st.builds(
    worker,
    st.uuids().map(str),
    blocks=st.integers(1, 60),
    seqs=st.integers(0, 4),
    max_seqs=st.integers(1, 6),
    backlog=st.integers(0, 1200),
    busy_until_s=st.sampled_from([None, 0.0, 10.01, 12.0]),
    speed=st.sampled_from([0.0, 500.0, 3000.0]),
    reads=st.booleans(),
    preempted=st.sampled_from([0, 0, 0, 1]),
    step_s=st.sampled_from([0.0, 0.02]),
    cost=st.sampled_from(
        [None, StepCost(base_s=0.005, decode_s=0.001, token_s=0.0005, pair_s=1e-7)]
    ),
    link=st.sampled_from([0.0, 1e5, 1e9]),
)
modes = st.sampled_from(["auto", "never", "always"])
reserves = st.integers(1, 300)
clusters = st.builds(
    cluster, st.lists(workers, max_size=4), st.lists(workers, max_size=4), modes, reserves
)
queues = st.lists(
    st.tuples(
        st.integers(1, 600), st.integers(1, 600), st.floats(0, 20), st.sampled_from([1, 1, 2, 16])
    ),
    max_size=20,
).map(
    lambda rows: [
        request(i, prompt=prompt, new=new, deadline_s=deadline, choices=choices)
        for i, (prompt, new, deadline, choices) in enumerate(rows)
    ]
)


def charged(view, queue, decisions):
    """The decode workers after these placements."""
    waiting = {each.transfer: each for each in queue}
    decodes = {each.endpoint: each for each in view.decodes}
    for decision in decisions:
        if not isinstance(decision, Reject):
            now = decodes[decision.decode]
            decodes[decision.decode] = charge_decode(now, view.rules, waiting[decision.transfer])
    return replace(view, decodes=tuple(decodes.values()))


def has_room(view, decode, waiting):
    return (
        not decode.num_preempted
        and decode.num_seqs + view.rules.reserved_seqs(decode, waiting) <= decode.max_seqs
        and view.rules.reserved_blocks(decode, waiting) <= decode.num_free_blocks
    )


def kept_blocks(decode, asked, reserve):
    """Written out: the prompt's full blocks once, the rest once for each answer, if that fits."""
    one = decode.blocks_for(asked.prompt_tokens + min(asked.max_new_tokens, reserve))
    full = (asked.prompt_tokens - 1) // decode.compatibility.block_size
    return min(full + asked.num_choices * (one - full), max(decode.num_blocks, one))


@given(clusters, queues)
def test_no_worker_is_given_more_than_it_has(view, queue):
    waiting = {each.transfer: each for each in queue}
    reserve = view.rules.reserve_answer_tokens
    placed = [d for d in decide(view, queue, now_s=10.0) if not isinstance(d, Reject)]
    split = [d for d in placed if isinstance(d, Disaggregated)]
    for decode in view.decodes:
        mine = [waiting[d.transfer] for d in placed if d.decode == decode.endpoint]
        kept = [kept_blocks(decode, w, reserve) for w in mine]
        assert sum(kept) <= decode.num_free_blocks or not mine
        seqs = sum(min(w.num_choices, decode.max_seqs) for w in mine)
        assert decode.num_seqs + seqs <= decode.max_seqs or not mine
        longest = [decode.blocks_for(w.prompt_tokens + w.max_new_tokens) for w in mine]
        assert max(longest, default=0) <= max(each.num_blocks for each in view.decodes)
    for prefill in view.prefills:
        mine = [waiting[d.transfer] for d in split if d.prefill == prefill.endpoint]
        needed = sum(prefill.blocks_for(w.prompt_tokens) for w in mine)
        assert needed <= prefill.num_free_blocks or not mine
        before_last = prefill.backlog_tokens + sum(w.prompt_tokens for w in mine[:-1])
        assert before_last < BACKLOG_STEPS * prefill.max_step_tokens or not mine
        if mine and prefill.prefill_tokens_per_s and prefill.busy_until_s is None:
            assert before_last / prefill.prefill_tokens_per_s < WINDOW_S


@given(clusters, queues)
def test_a_decode_worker_is_given_prompts_only_where_it_reads_them_and_in_small_measure(
    view, queue
):
    waiting = {each.transfer: each for each in queue}
    local = [d for d in decide(view, queue, now_s=10.0) if isinstance(d, Local)]
    assert view.rules.local_prefill != "never" or not local
    for decode in view.decodes:
        mine = [waiting[d.transfer] for d in local if d.decode == decode.endpoint]
        if mine:
            assert decode.local_prefill and not decode.num_preempted
            before_last = decode.backlog_tokens + sum(w.prompt_tokens for w in mine[:-1])
            assert before_last < BACKLOG_STEPS * decode.max_step_tokens
            if decode.prefill_tokens_per_s and decode.busy_until_s is None:
                assert before_last / decode.prefill_tokens_per_s < WINDOW_S


@given(clusters, queues)
def test_the_order_in_which_workers_are_listed_changes_nothing(view, queue):
    turned = replace(view, prefills=view.prefills[::-1], decodes=view.decodes[::-1])
    assert decide(turned, queue, now_s=10.0) == decide(view, queue, now_s=10.0)


@given(clusters, queues)
def test_who_overtakes_takes_nothing_from_the_first_that_waits(view, queue):
    decisions = decide(view, queue, now_s=10.0)
    decided = {d.transfer for d in decisions}
    placed = {d.transfer for d in decisions if not isinstance(d, Reject)}
    still_waiting = [w.transfer not in decided for w in queue]
    if any(still_waiting):
        first = still_waiting.index(True)
        read_here = {d.transfer for d in decisions if isinstance(d, Local)}
        behind = [w for w in queue[first:] if w.transfer in placed]
        assert all(w.transfer in read_here for w in behind)
        if behind:  # the head still finds the room that it would have found
            head = queue[first]
            alone = decide(view, [*queue[:first], head], now_s=10.0)
            assert alone == [d for d in decisions if d.transfer in {a.transfer for a in alone}]
            left = charged(view, queue, decisions)
            assert any(has_room(left, d, head) for d in left.decodes)


@given(clusters, queues)
def test_each_request_gets_one_decision_at_most_and_always_the_same(view, queue):
    decisions = decide(view, queue, now_s=10.0)
    assert len({d.transfer for d in decisions}) == len(decisions)
    assert decide(view, queue, now_s=10.0) == decisions


guest_marks = st.tuples(st.integers(0, 1100), st.sampled_from([0.0, 10.01, 12.0]))


@given(clusters, queues, st.data())
def test_beside_a_flood_no_worker_is_given_more_than_it_has_either(view, queue, data):
    tenants = [data.draw(st.sampled_from(["flood", "guest", "other"])) for _ in queue]
    queue = [replace(each, tenant=t) for each, t in zip(queue, tenants, strict=True)]

    def with_guests(pool):
        marks = [data.draw(guest_marks) for _ in pool]
        return tuple(
            replace(
                each,
                guest_backlog_tokens=min(tokens, each.backlog_tokens),
                guest_busy_until_s=min(busy_s, each.busy_until_s or 0.0),
            )
            for each, (tokens, busy_s) in zip(pool, marks, strict=True)
        )

    view = replace(
        view,
        prefills=with_guests(view.prefills),
        decodes=with_guests(view.decodes),
        greedy=frozenset({"flood"}),
    )
    decisions = decide(view, queue, now_s=10.0)
    turned = replace(view, prefills=view.prefills[::-1], decodes=view.decodes[::-1])
    assert len({d.transfer for d in decisions}) == len(decisions)
    assert sorted(map(str, decide(turned, queue, now_s=10.0))) == sorted(map(str, decisions))
    waiting = {each.transfer: each for each in queue}
    placed = [d for d in decisions if not isinstance(d, Reject)]
    for decode in view.decodes:
        mine = [waiting[d.transfer] for d in placed if d.decode == decode.endpoint]
        kept = [kept_blocks(decode, w, view.rules.reserve_answer_tokens) for w in mine]
        assert sum(kept) <= decode.num_free_blocks or not mine
        seqs = sum(min(w.num_choices, decode.max_seqs) for w in mine)
        assert decode.num_seqs + seqs <= decode.max_seqs or not mine
    split = [d for d in placed if isinstance(d, Disaggregated)]
    local = [d for d in placed if isinstance(d, Local)]
    for prefill in view.prefills:
        mine = [waiting[d.transfer] for d in split if d.prefill == prefill.endpoint]
        needed = sum(prefill.blocks_for(w.prompt_tokens) for w in mine)
        assert needed <= prefill.num_free_blocks or not mine
        assert_guests_in_small_measure(prefill, mine)
    for decode in view.decodes:
        mine = [waiting[d.transfer] for d in local if d.decode == decode.endpoint]
        assert_guests_in_small_measure(decode, mine)


def assert_guests_in_small_measure(reader, given_to_it):
    """However soon it was expected to have read them."""
    guests = [w.prompt_tokens for w in given_to_it if w.tenant != "flood"]
    most = BACKLOG_STEPS * reader.max_step_tokens
    assert reader.guest_backlog_tokens + sum(guests[:-1]) < most or not guests


def idle(workers):
    return tuple(
        replace(
            each,
            num_free_blocks=each.num_blocks,
            num_seqs=0,
            backlog_tokens=0,
            busy_until_s=None,
            num_preempted=0,
        )
        for each in workers
    )


@given(clusters, queues)
def test_a_cluster_that_has_emptied_decides_on_the_head_of_the_queue_whatever_it_is(view, queue):
    view = replace(view, prefills=idle(view.prefills), decodes=idle(view.decodes))
    decisions = decide(view, queue, now_s=0.0)
    if not_ready(view) is None and queue:
        assert queue[0].transfer in {decision.transfer for decision in decisions}


def test_a_deadline_that_passed_is_refused_even_behind_a_blocked_head():
    view = cluster([worker("p")], [worker("d", free=0)])
    queue = [request(1), request(2, deadline_s=5.0)]
    (decision,) = decide(view, queue, now_s=5.0)
    assert isinstance(decision, Reject)
    assert decision.transfer.request_id == "r2"
    assert decision.failure.code == "deadline_exceeded"


def test_what_no_worker_can_ever_hold_is_refused_at_once():
    view = cluster([worker("p")], [worker("d", blocks=10, free=0)])
    (decision,) = decide(view, [request(1, prompt=100, new=100)], now_s=0.0)
    assert isinstance(decision, Reject)
    assert decision.failure.code == "context_length_exceeded"
    assert "holds 160" in decision.failure.message


def test_without_workers_a_request_waits():
    assert decide(cluster(), [request(1)], now_s=0.0) == []


def test_an_excluded_worker_is_not_chosen():
    view = cluster([worker("p"), worker("q")], [worker("d"), worker("e")])
    (decision,) = decide(view, [request(1, excluded=["p/1", "d/1"])], now_s=0.0)
    assert where(decision) == ("q", "e")


def test_an_excluded_worker_that_stays_registered_is_chosen_again():
    view = cluster([worker("p")], [worker("d")])
    waiting = [request(1, excluded=["d/1"])]
    assert decide(view, waiting, now_s=9.9) == []
    assert isinstance(decide(view, waiting, now_s=10.0)[0], Disaggregated)


def test_waiting_for_other_workers_does_not_hold_up_those_behind():
    view = cluster([worker("p")], [worker("d")])
    queue = [request(1, excluded=["p/1"]), request(2)]
    (decision,) = decide(view, queue, now_s=0.0)
    assert isinstance(decision, Disaggregated)
    assert decision.transfer.request_id == "r2"


def test_a_cluster_of_strangers_says_why_it_is_not_ready():
    other = replace(SAME, revision="2", dtype="float32")
    view = cluster([worker("p")], [worker("d", compatibility=other)])
    reason = not_ready(view)
    assert reason is not None
    assert "revision '1' and '2'" in reason
    assert "dtype 'bfloat16' and 'float32'" in reason
    assert not_ready(cluster([worker("p")], [worker("d")])) is None


def test_a_pair_that_is_not_compatible_is_not_chosen():
    other = replace(SAME, revision="2")
    view = cluster([worker("p")], [worker("d", compatibility=other)])
    assert decide(view, [request(1)], now_s=0.0) == []


def test_work_spreads_over_equal_workers():
    view = cluster([worker("p"), worker("q")], [worker("d"), worker("e")])
    decisions = decide(view, [request(i, prompt=8) for i in range(4)], now_s=0.0)
    assert [where(d) for d in decisions] == [("p", "d"), ("q", "e")] * 2


# --- who reads the prompt ------------------------------------------------------------------------

P = {"speed": 3000.0}
D = {"speed": 1500.0, "reads": True}


def test_an_idle_prefill_worker_reads_the_prompt():
    (decision,) = decide(cluster([worker("p", **P)], [worker("d", **D)]), [request(1)], now_s=0.0)
    assert where(decision) == ("p", "d")


def test_a_decode_worker_reads_what_would_wait_longer_elsewhere():
    view = cluster([worker("p", backlog=1000, **P)], [worker("d", **D)])
    (decision,) = decide(view, [request(1, prompt=100)], now_s=0.0)  # 0.37 s there, 0.07 s here
    assert decision == Local(transfer=request(1).transfer, decode=view.decodes[0].endpoint)


def test_a_long_prompt_waits_for_a_busy_prefill_worker_that_is_faster_all_the_same():
    view = cluster([worker("p", backlog=1000, **P)], [worker("d", **D)])
    assert decide(view, [request(1, prompt=1200)], now_s=0.0) == []  # 0.73 s there, 0.8 s here


def test_behind_a_prompt_that_waits_a_short_one_is_read_by_the_decode_worker():
    view = cluster([worker("p", backlog=1000, **P)], [worker("d", **D)])
    queue = [request(1, prompt=1200), request(2, prompt=100)]
    (decision,) = decide(view, queue, now_s=0.0)
    assert decision.transfer.request_id == "r2"
    assert isinstance(decision, Local)


def test_but_not_where_the_one_that_waits_would_miss_the_room():
    view = cluster([worker("p", backlog=1000, **P)], [worker("d", free=80, **D)])
    queue = [request(1, prompt=1200), request(2, prompt=100)]  # 77 blocks and 8
    assert decide(view, queue, now_s=0.0) == []


COST = StepCost(base_s=0.01, decode_s=0.001, token_s=0.0007)


def test_answers_that_would_stand_still_keep_a_prompt_from_the_decode_worker():
    """0.37 s with the pair, 0.07 s here; seven answers of 20 tokens lose 0.07 s each."""
    busy = worker("p", backlog=1000, **P)
    quiet = cluster([busy], [worker("d", cost=COST, **D)])
    assert isinstance(decide(quiet, [request(1, prompt=100)], now_s=0.0)[0], Local)
    decoding = cluster([worker("p", backlog=80, **P)], [worker("d", seqs=7, cost=COST, **D)])
    (decision,) = decide(decoding, [request(1, prompt=100)], now_s=0.0)
    assert isinstance(decision, Disaggregated)
    alone = cluster([worker("p", backlog=80, **P)], [worker("d", seqs=0, cost=COST, **D)])
    (decision,) = decide(alone, [request(1, prompt=50)], now_s=0.0)
    assert isinstance(decision, Local)


def test_the_answers_go_where_they_cost_least():
    slow = StepCost(base_s=0.05, decode_s=0.001)
    decodes = [worker("d", cost=slow), worker("e", seqs=3, cost=COST)]
    assert where(decide(cluster([worker("p")], decodes), [request(1)], now_s=0.0)[0]) == ("p", "e")


def test_a_slow_link_is_part_of_the_time_to_the_first_token():
    near, far = {"link": 1e9, **P}, {"link": 1e3, **P}
    view = cluster([worker("p", **far), worker("q", **near)], [worker("d")])
    assert where(decide(view, [request(1, prompt=64)], now_s=0.0)[0]) == ("q", "d")
    slow = cluster([worker("p", **far)], [worker("d", **D)])
    assert where(decide(slow, [request(1, prompt=64)], now_s=0.0)[0]) == ("d", "d")


class Held:
    """Who holds how many of every prompt's blocks."""

    def __init__(self, **blocks):
        self.blocks = {f"{name}/1": count for name, count in blocks.items()}

    def match(self, block_hashes):
        return self.blocks


def test_who_holds_the_prompts_beginning_reads_it_though_others_are_idler():
    view = cluster([worker("p", **P), worker("q", backlog=60, **P)], [worker("d")])
    asked = replace(request(1, prompt=400), block_hashes=tuple(range(24)))
    assert where(decide(view, [asked], now_s=0.0)[0]) == ("p", "d")
    known = replace(view, prefixes=Held(q=20))
    (decision,) = decide(known, [asked], now_s=0.0)
    assert where(decision) == ("q", "d")
    assert decision.explanation.candidates[0].cached_tokens == 320


def test_a_decode_worker_that_holds_nearly_all_of_the_prompt_reads_the_rest():
    view = cluster([worker("p", **P)], [worker("d", **D), worker("e", **D)])
    asked = replace(request(1, prompt=400), block_hashes=tuple(range(24)))
    assert where(decide(view, [asked], now_s=0.0)[0]) == ("p", "d")
    assert where(decide(replace(view, prefixes=Held(e=24)), [asked], now_s=0.0)[0]) == ("e", "e")


def test_a_long_prompts_attention_counts():
    """Both read 1000 tokens a second; but q's attention is a hundred times as dear."""
    cheap, dear = StepCost(token_s=0.001, pair_s=1e-9), StepCost(token_s=0.001, pair_s=1e-7)
    view = cluster([worker("p", cost=dear), worker("q", backlog=29, cost=cheap)], [worker("d")])
    assert where(decide(view, [request(1, prompt=16)], now_s=0.0)[0]) == ("p", "d")
    assert where(decide(view, [request(1, prompt=1200)], now_s=0.0)[0]) == ("q", "d")


def test_each_placement_says_what_it_was_chosen_from():
    view = cluster([worker("p", **P)], [worker("d", **D)])
    (decision,) = decide(view, [request(1, prompt=300)], now_s=0.0)
    taken, other = decision.explanation.candidates
    assert (taken.prefill, taken.decode) == ("p/1", "d/1")
    assert (other.prefill, other.decode) == ("", "d/1")
    assert taken.ttft_s == pytest.approx(0.1)
    assert other.ttft_s == pytest.approx(0.2)
    assert decision.explanation.num_candidates == 2
    assert decision.explanation.reason


@pytest.mark.parametrize("speeds", [(0.0, 1500.0), (3000.0, 0.0), (0.0, 0.0)])
def test_until_both_speeds_are_known_the_prefill_worker_reads(speeds):
    p, d = speeds
    view = cluster([worker("p", backlog=20, speed=p)], [worker("d", speed=d, reads=True)])
    assert where(decide(view, [request(1)], now_s=0.0)[0]) == ("p", "d")


def test_a_worker_that_has_read_none_yet_is_taken_to_be_as_fast_as_its_peers():
    prefills = [worker("p", backlog=1000, **P), worker("q", backlog=900)]
    view = cluster(prefills, [worker("d", **D)])
    assert where(decide(view, [request(1)], now_s=0.0)[0]) == ("d", "d")


def test_a_decode_worker_that_reads_no_prompts_is_given_none():
    view = cluster([worker("p", backlog=80, **P)], [worker("d", speed=1500.0)])
    assert where(decide(view, [request(1)], now_s=0.0)[0]) == ("p", "d")


def test_prompts_go_to_the_decode_worker_that_reads_them_first():
    decodes = [
        worker("d", backlog=2, speed=100.0, reads=True),
        worker("e", backlog=40, speed=1500.0, reads=True),
    ]
    assert where(decide(cluster([], decodes), [request(1)], now_s=0.0)[0]) == ("e", "e")


def test_without_prefill_workers_decode_workers_read():
    view = cluster([], [worker("d", reads=True), worker("e", reads=True)])
    decisions = decide(view, [request(i) for i in range(2)], now_s=0.0)
    assert [where(d) for d in decisions] == [("d", "d"), ("e", "e")]
    assert not_ready(view) is None


def test_a_worker_with_enough_to_read_leaves_the_next_prompt_in_the_queue():
    view = cluster([], [worker("d", speed=1000.0, reads=True)])
    queue = [request(1, prompt=29), request(2, prompt=499), request(3, prompt=1)]
    assert [d.transfer.request_id for d in decide(view, queue, now_s=0.0)] == ["r1", "r2"]
    slow = cluster([], [worker("d", speed=0.1, reads=True)])
    assert len(decide(slow, queue, now_s=0.0)) == 1, "however slow, it takes one"


def test_a_worker_that_is_about_to_be_free_takes_the_next_prompt():
    soon = cluster([worker("p", backlog=300, busy_until_s=5.0)], [worker("d")])
    assert decide(soon, [request(1)], now_s=4.9) == []
    assert isinstance(decide(soon, [request(1)], now_s=4.98)[0], Disaggregated)
    late = cluster([worker("p", backlog=1024, busy_until_s=5.0)], [worker("d")])
    assert decide(late, [request(1)], now_s=9.0) == [], "it has too much, whatever was expected"


def test_never_is_as_if_no_decode_worker_could_read():
    decodes = [worker("d", **D)]
    busy = cluster([worker("p", backlog=80, **P)], decodes, "never")
    assert where(decide(busy, [request(1)], now_s=0.0)[0]) == ("p", "d")
    alone = cluster([], decodes, "never")
    assert decide(alone, [request(1)], now_s=0.0) == []
    assert not_ready(alone) == "no prefill worker is ready"


def test_always_leaves_prefill_workers_idle_while_a_decode_worker_reads():
    view = cluster([worker("p", **P)], [worker("d", backlog=45, **D)], "always")
    assert decide(view, [request(1)], now_s=0.0) == []
    view = cluster([worker("p", **P)], [worker("d", backlog=44, **D)], "always")
    assert where(decide(view, [request(1)], now_s=0.0)[0]) == ("d", "d")
    view = cluster([worker("p", **P)], [worker("d")], "always")
    assert where(decide(view, [request(1)], now_s=0.0)[0]) == ("p", "d")


def test_a_request_lost_with_its_prefill_worker_is_read_by_a_decode_worker():
    view = cluster([worker("p", **P)], [worker("d", **D)])
    assert where(decide(view, [request(1, excluded=["p/1"])], now_s=0.0)[0]) == ("d", "d")


def test_a_prompt_too_long_for_the_prefill_workers_is_read_by_a_decode_worker():
    view = cluster([worker("p", blocks=2, **P)], [worker("d", **D)])
    assert where(decide(view, [request(1, prompt=100)], now_s=0.0)[0]) == ("d", "d")


def test_readiness_names_what_is_missing():
    assert not_ready(cluster()) == "no worker is ready"
    assert not_ready(cluster([worker("p")])) == "no decode worker is ready"
    assert not_ready(cluster([], [worker("d")])) == "no prefill worker is ready"


# --- room for answers ----------------------------------------------------------------------------


def test_of_a_long_answer_only_a_part_is_reserved():
    view = cluster([worker("p")], [worker("d", blocks=100, free=20)])
    long, short = request(1, prompt=16, new=1000), request(2, prompt=16, new=16)
    decisions = decide(view, [long, short, short], now_s=0.0)
    assert len(decisions) == 2  # 17 blocks and 2


def test_several_answers_take_room_for_each_but_the_prompts_full_blocks_once():
    view = cluster([worker("p", **P)], [worker("d", blocks=100, free=24, max_seqs=9)])
    # 33 tokens of prompt fill two blocks; each answer takes two more, of which one begins it.
    four = request(1, prompt=33, new=16, choices=4)
    decisions = decide(view, [four, four, four], now_s=0.0)
    assert len(decisions) == 2  # 10 blocks and 4 sequences each
    room = cluster([worker("p", **P)], [worker("d", blocks=100, free=100, max_seqs=9)])
    assert len(decide(room, [four, four, four], now_s=0.0)) == 2


def test_more_answers_than_fit_beside_each_other_are_given_by_a_worker_that_is_empty():
    many = request(1, prompt=33, new=160, choices=16)
    idle = cluster([worker("p")], [worker("d", blocks=40, max_seqs=8)])
    assert where(decide(idle, [many], now_s=0.0)[0]) == ("p", "d")
    used = cluster([worker("p")], [worker("d", blocks=40, free=39, max_seqs=8)])
    assert decide(used, [many], now_s=0.0) == []
    other = cluster([worker("p")], [worker("d", blocks=40, max_seqs=8, seqs=1)])
    assert decide(other, [many], now_s=0.0) == []


def test_a_request_must_fit_with_its_longest_answer_when_it_is_alone():
    view = cluster([worker("p")], [worker("d", blocks=60)])
    (decision,) = decide(view, [request(1, prompt=16, new=1000)], now_s=0.0)
    assert isinstance(decision, Reject)
    assert (
        decision.failure.message
        == "the request needs KV for 1016 tokens; a decode worker holds 960"
    )


def test_what_was_preempted_goes_first():
    view = cluster([worker("p")], [worker("d", preempted=1), worker("e", seqs=5)])
    assert where(decide(view, [request(1)], now_s=0.0)[0]) == ("p", "e")
    only = cluster([worker("p")], [worker("d", preempted=1, reads=True)])
    assert decide(only, [request(1)], now_s=0.0) == []


# --- shares, deadlines, the queue ----------------------------------------------------------------


def of(tenant, number, **more):
    return replace(request(number, **more), tenant=tenant)


def test_a_tenant_with_more_than_its_share_leaves_room_for_others():
    view = replace(cluster([worker("p")], [worker("d", seqs=7)]), greedy=frozenset({"flood"}))
    queue = [of("flood", 1), of("flood", 2), of("guest", 3)]
    (decision,) = decide(view, queue, now_s=0.0)
    assert decision.transfer.request_id == "r3"
    alone = replace(view, greedy=frozenset())
    assert [d.transfer.request_id for d in decide(alone, queue, now_s=0.0)] == ["r1"]


def test_a_guest_does_not_wait_for_prompts_that_are_read_after_its_own():
    busy = worker("p", busy_until_s=5.0, **P)
    view = replace(cluster([busy], [worker("d")]), greedy=frozenset({"flood"}))
    decisions = decide(view, [of("flood", 1), of("guest", 2)], now_s=1.0)
    assert [d.transfer.request_id for d in decisions] == ["r2"]


def test_but_it_does_for_those_of_other_guests():
    busy = replace(worker("p", busy_until_s=5.0, **P), guest_busy_until_s=5.0)
    view = replace(cluster([busy], [worker("d")]), greedy=frozenset({"flood"}))
    assert decide(view, [of("flood", 1), of("guest", 2)], now_s=1.0) == []


def test_a_guest_that_was_read_elsewhere_is_not_placed_again_behind_another_guest():
    busy = replace(worker("p", busy_until_s=2.0, speed=1000.0), guest_busy_until_s=2.0)
    reader = worker("d", speed=100.0, reads=True)
    view = replace(cluster([busy], [reader]), greedy=frozenset({"flood"}))
    queue = [of("flood", 1, prompt=400), of("guest", 2, prompt=400), of("guest", 3, prompt=2)]
    (decision,) = decide(view, queue, now_s=1.0)
    assert isinstance(decision, Local) and decision.transfer.request_id == "r3"


def late(view, waiting, ahead, now_s=0.0):
    reject = refuse_early(view, waiting, ahead=ahead, now_s=now_s)
    return None if reject is None else (reject.failure.code, reject.retry_after_s)


def test_what_the_queue_alone_would_make_late_is_refused_at_once_and_told_when_to_come_back():
    view = replace(
        cluster([worker("p", **P)], [worker("d", step_s=0.02)]), drain_per_s=100.0, answer_tokens=50
    )
    asked = request(1, prompt=300, new=64, deadline_s=5.0)  # 0.1 s to read, 1 s to answer
    assert late(view, asked, ahead=0.0) is None
    assert late(view, asked, ahead=220.0) is None  # half as long again would still do
    assert late(view, asked, ahead=230.0) == ("overloaded", pytest.approx(1.0))
    assert late(view, asked, ahead=1000.0) == ("overloaded", pytest.approx(6.1))


def test_a_deadline_that_an_idle_cluster_would_miss_too_is_the_clients_own_affair():
    view = replace(cluster([worker("p", **P)], [worker("d", step_s=0.02)]), drain_per_s=100.0)
    long = request(1, prompt=300, new=1000, deadline_s=2.0)  # 5 s for 256 tokens
    assert late(view, long, ahead=100.0) is None
    assert late(view, long, ahead=200.0) is not None, "not even its first token comes in time"


def test_nothing_is_refused_early_while_nothing_is_known():
    view = cluster([worker("p", **P)], [worker("d", step_s=0.02)])
    assert late(view, request(1, deadline_s=0.1), ahead=1e9) is None


def test_what_has_become_late_in_the_queue_is_refused_instead_of_computed_in_vain():
    view = cluster([worker("p", **P)], [worker("d", step_s=0.02)])
    asked = request(1, prompt=300, new=50, deadline_s=5.0)
    assert isinstance(decide(view, [asked], now_s=3.3)[0], Disaggregated)
    (decision,) = decide(view, [asked], now_s=3.4)
    assert decision.failure.code == "overloaded"


@given(clusters, queues)
def test_the_queue_and_a_list_in_its_order_are_decided_alike(view, queue):
    made = RequestQueue()
    for each in queue:
        made.add(replace(each, cost=float(each.prompt_tokens)))
    ordered = list(made.in_order())
    decisions = decide(view, made, now_s=10.0)
    assert {repr(d) for d in decisions} == {repr(d) for d in decide(view, ordered, now_s=10.0)}


def test_a_moment_in_the_queue_is_not_what_made_a_near_deadline_be_missed():
    view = cluster([worker("p", **P)], [worker("d", step_s=0.02)])
    asked = request(1, prompt=300, new=50, deadline_s=1.4)  # 1.1 s of work: no time for a doubt
    (decision,) = decide(view, [asked], now_s=0.01)
    assert isinstance(decision, Disaggregated)
    (decision,) = decide(view, [asked], now_s=0.4)
    assert decision.failure.code == "overloaded"
