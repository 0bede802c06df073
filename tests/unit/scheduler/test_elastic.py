"""Who serves which role: what the controller promises, whatever is asked of it."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.messages import StepCost, WorkerRole
from scheduler.demand import Capacity, Demand, DemandMeter, Loads, loads
from scheduler.elastic import (
    ElasticSettings,
    Memory,
    PoolWorker,
    Split,
    Why,
    pressure,
    steer,
    wanted,
)

PREFILL, DECODE = WorkerRole.PREFILL, WorkerRole.DECODE
TICK_S = 1.0
SETTINGS = ElasticSettings()


def pool(num_prefill, num_decode, **fields):
    roles = [PREFILL] * num_prefill + [DECODE] * num_decode
    return [
        PoolWorker(name=f"worker-{n}", role=role, num_blocks=100, num_free_blocks=90, **fields)
        for n, role in enumerate(roles)
    ]


def num_prefill(workers):
    return sum(1 for each in workers if each.role is PREFILL)


class World:
    """Workers that do what the controller wishes, each turn taking `turn_ticks`."""

    def __init__(self, workers, settings=SETTINGS, *, turn_ticks=3):
        self.workers = {each.name: each for each in workers}
        self.settings = settings
        self.memory = Memory()
        self.now_s = 0.0
        self.turns = []
        self._turn_ticks = turn_ticks
        self._left = {}

    def tick(self, asked):
        self.now_s += TICK_S
        for name in list(self._left):
            self._left[name] -= 1
            if self._left[name] <= 0:
                del self._left[name]
                self.workers[name] = dataclasses.replace(self.workers[name], turning=False)
        wishes, self.memory = steer(
            list(self.workers.values()), asked, self.settings, self.memory, now_s=self.now_s
        )
        if wishes.turn is not None:
            assert not self._left, "a turn was begun while another was in progress"
            worker = self.workers[wishes.turn.worker]
            assert worker.role is not wishes.turn.role
            self.workers[worker.name] = dataclasses.replace(
                worker, role=wishes.turn.role, turning=True
            )
            self._left[worker.name] = self._turn_ticks
            self.turns.append((self.now_s, wishes.turn))
        return wishes

    def run(self, asked, ticks=280):
        for _ in range(ticks):
            wishes = self.tick(asked)
        return wishes

    @property
    def split(self):
        prefill = num_prefill(self.workers.values())
        return Split(prefill=prefill, decode=len(self.workers) - prefill)


asked_loads = st.builds(Loads, prefill=st.floats(0, 40), decode=st.floats(0, 40))
pools = st.tuples(st.integers(0, 5), st.integers(0, 5)).map(lambda sizes: pool(*sizes))


@st.composite
def wishes_of_a_person(draw):
    least_p, least_d = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    override = st.builds(Split, prefill=st.integers(1, 8), decode=st.integers(1, 8))
    return ElasticSettings(
        min_prefill=least_p,
        max_prefill=draw(st.integers(least_p, 10)),
        min_decode=least_d,
        max_decode=draw(st.integers(least_d, 10)),
        hysteresis=draw(st.floats(0.05, 0.5)),
        override=draw(st.none() | override),
    )


@given(pools, wishes_of_a_person(), st.lists(asked_loads, min_size=1, max_size=5))
@settings(max_examples=40, deadline=None)
def test_no_role_is_ever_left_without_workers(workers, settings, changing_demand):
    world = World(workers, settings)
    had = world.split
    for asked in changing_demand:
        for _ in range(60):
            world.tick(asked)
            assert world.split.prefill >= min(1, had.prefill)
            assert world.split.decode >= min(1, had.decode)


@given(pools, wishes_of_a_person(), asked_loads)
@settings(max_examples=40, deadline=None)
def test_a_constant_demand_is_answered_by_few_turns_and_then_by_none(workers, settings, asked):
    world = World(workers, settings)
    world.run(asked)
    assert len(world.turns) <= len(workers)
    assert len({turn.role for _, turn in world.turns}) <= 1, "a turn was taken back"
    before = len(world.turns)
    world.run(asked, ticks=100)
    assert len(world.turns) == before


@given(st.integers(1, 5), st.integers(1, 5), asked_loads)
@settings(max_examples=40, deadline=None)
def test_it_converges_to_a_split_that_is_nearly_the_best(prefills, decodes, asked):
    world = World(pool(prefills, decodes))
    world.run(asked)
    n = prefills + decodes
    best = min(pressure(p, n - p, asked) for p in range(1, n))
    reached = pressure(world.split.prefill, world.split.decode, asked)
    assert reached < SETTINGS.busy or reached <= best / (1 - SETTINGS.hysteresis) + 1e-9


@given(pools, wishes_of_a_person(), asked_loads)
@settings(max_examples=40, deadline=None)
def test_bounds_are_kept_where_they_can_be(workers, settings, asked):
    world = World(workers, settings)
    world.run(asked)
    n = len(workers)
    splits = [
        Split(prefill=p, decode=n - p)
        for p in range(1, n)
        if settings.min_prefill <= p <= settings.max_prefill
        and settings.min_decode <= n - p <= settings.max_decode
    ]
    if splits:
        assert world.split in splits
    else:
        assert not world.turns


@given(st.integers(2, 9), st.data(), asked_loads)
@settings(max_examples=40, deadline=None)
def test_a_persons_split_is_reached_whatever_the_demand(n, data, asked):
    chosen = data.draw(st.integers(1, n - 1))
    begin = data.draw(st.integers(1, n - 1))
    override = Split(prefill=chosen, decode=n - chosen)
    world = World(pool(begin, n - begin), ElasticSettings(override=override))
    world.run(asked, ticks=5 * n)
    assert world.split == override
    assert all(turn.why is Why.OVERRIDE for _, turn in world.turns)


@given(pools, wishes_of_a_person(), asked_loads, st.floats(0, 100))
@settings(max_examples=40, deadline=None)
def test_the_same_view_gives_the_same_wishes(workers, settings, asked, now_s):
    memory = Memory(short=PREFILL, short_since_s=now_s - 30, turned_s=now_s - 60)
    once = steer(workers, asked, settings, memory, now_s=now_s)
    again = steer(list(reversed(workers)), asked, settings, memory, now_s=now_s)
    assert once == again


def test_a_demand_that_swings_faster_than_the_patience_turns_nobody():
    world = World(pool(2, 2))
    for n in range(200):
        world.tick(Loads(prefill=3.0, decode=0.5) if n % 8 < 4 else Loads(prefill=0.5, decode=3.0))
    assert not world.turns


def test_a_new_kind_of_demand_turns_workers_and_the_old_one_turns_them_back():
    world = World(pool(2, 2))
    world.run(Loads(prefill=2.7, decode=0.3), ticks=120)
    assert world.split == Split(prefill=3, decode=1)
    world.run(Loads(prefill=1.6, decode=1.6), ticks=120)
    assert world.split == Split(prefill=2, decode=2)
    assert len(world.turns) == 2


def test_turns_are_a_cooldown_apart():
    world = World(pool(1, 5), turn_ticks=4)
    world.run(Loads(prefill=5.0, decode=0.5))
    times = [at_s for at_s, _ in world.turns]
    assert len(times) >= 3
    for earlier, later in itertools.pairwise(times):
        assert later - earlier >= SETTINGS.cooldown_s


def test_nobody_turns_while_there_is_little_to_do():
    world = World(pool(1, 3))
    world.run(Loads(prefill=0.39, decode=0.0))
    assert not world.turns


def test_a_decode_worker_stays_while_its_peers_have_no_room_for_what_it_holds():
    full = [dataclasses.replace(each, num_free_blocks=10) for each in pool(1, 3)]
    asked = Loads(prefill=3.0, decode=0.5)
    world = World(full)
    world.run(asked, ticks=60)
    assert not world.turns
    world.workers = {
        each.name: dataclasses.replace(each, num_free_blocks=60) for each in world.workers.values()
    }
    world.run(asked, ticks=60)
    assert world.turns


def test_who_has_least_to_hand_over_turns():
    workers = pool(1, 3)
    busy = [
        dataclasses.replace(each, num_placed=placed)
        for each, placed in zip(workers, (9, 7, 2, 5), strict=True)
    ]
    world = World(busy)
    world.run(Loads(prefill=3.0, decode=0.5), ticks=20)
    assert world.turns[0][1].worker == "worker-2"


def test_a_worker_that_is_missing_from_a_persons_split_is_waited_for():
    override = ElasticSettings(override=Split(prefill=2, decode=2))
    world = World(pool(1, 2), override)
    world.run(Loads(prefill=0.0, decode=9.0))
    assert not world.turns
    world = World(pool(0, 3), override)
    world.run(Loads(prefill=0.0, decode=9.0))
    assert world.split == Split(prefill=1, decode=2)
    assert [turn.why for _, turn in world.turns] == [Why.EMPTY]


def test_without_measurements_nobody_turns():
    world = World(pool(1, 3))
    assert world.run(None).wanted == Split(prefill=1, decode=1)
    assert not world.turns


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (Loads(prefill=0.0, decode=0.0), Split(prefill=1, decode=1)),
        (Loads(prefill=0.7, decode=1.4), Split(prefill=1, decode=2)),
        (Loads(prefill=2.2, decode=90.0), Split(prefill=4, decode=6)),
    ],
)
def test_wanted_workers_have_some_room_to_spare_within_the_bounds(asked, expected):
    assert wanted(asked, ElasticSettings(max_decode=6)) == expected


CAPACITY = Capacity(
    cost=StepCost(base_s=0.01, decode_s=0.001, token_s=0.0001, pair_s=0.0),
    max_step_tokens=500,
    max_seqs=64,
    kv_tokens=100_000,
    step_target_s=0.05,
)


def test_loads_count_what_steps_cost():
    demand = Demand(read_tokens_per_s=5000, answer_tokens_per_s=400, held_tokens=100)
    asked = loads(demand, CAPACITY)
    assert asked.prefill == pytest.approx(10 * 0.01 + 5000 * 0.0001)
    # Forty answers are decoded within the target, each token for a fortieth of the base.
    assert asked.decode == pytest.approx(400 * (0.01 / 40 + 0.001))


def test_long_answers_that_came_long_ago_count_while_they_are_written():
    # Thirty on each of two workers: a step takes 40 ms, so 1500 tokens come each second.
    writing = Demand(num_decoding=60, num_decode_workers=2, held_tokens=100)
    assert loads(writing, CAPACITY).decode == pytest.approx(1500 * (0.01 / 40 + 0.001))
    more = dataclasses.replace(writing, answer_tokens_per_s=2000)
    assert loads(more, CAPACITY).decode == pytest.approx(2000 * (0.01 / 40 + 0.001))


def test_a_small_kv_pool_makes_decoding_dearer():
    demand = Demand(answer_tokens_per_s=400, held_tokens=10_000)
    asked = loads(demand, CAPACITY)
    assert asked.decode == pytest.approx(400 * (0.01 / 10 + 0.001))


def test_what_waits_in_the_queue_asks_for_more_workers_of_both_roles():
    quiet = Demand(read_tokens_per_s=1000, cost_per_s=1000, answer_tokens_per_s=100)
    waiting = dataclasses.replace(quiet, queued_cost=10_000)
    once, twice = loads(quiet, CAPACITY), loads(waiting, CAPACITY)
    assert twice.prefill == pytest.approx(2 * once.prefill)
    assert twice.decode == pytest.approx(2 * once.decode)


def test_the_meter_gives_the_rates_of_a_steady_stream_and_forgets_them():
    meter = DemandMeter()
    for n in range(1000):
        at_s = n / 10
        meter.arrived(prompt_tokens=100, num_answers=2, answer_tokens=30, cost=9.0, now_s=at_s)
        meter.placed(prompt_tokens=100, cached_tokens=25, now_s=at_s)
    demand = meter.demand(100.0)
    assert demand.read_tokens_per_s == pytest.approx(750, rel=0.05)
    assert demand.answer_tokens_per_s == pytest.approx(600, rel=0.05)
    assert demand.held_tokens == pytest.approx(80, rel=0.01)
    assert demand.cost_per_s == pytest.approx(90, rel=0.05)
    assert meter.demand(400.0).answer_tokens_per_s < 1


def test_the_first_requests_are_no_flood():
    meter = DemandMeter()
    meter.arrived(prompt_tokens=1000, num_answers=1, answer_tokens=10, cost=1.0, now_s=5.0)
    assert meter.demand(5.0).read_tokens_per_s < 1000


def test_where_decode_workers_read_too_their_spare_time_is_no_reason_to_turn_one():
    reading = Loads(prefill=2.65, decode=0.45)
    assert pressure(2, 2, reading) > 1.2
    assert pressure(3, 1, reading) < 0.9
    # All four read already, so that a turn would gain little.
    beside = [pressure(p, 4 - p, reading, decoders_read=True) for p in (2, 3)]
    assert beside[1] > 0.8 * beside[0]
    assert max(beside) < 0.95


def test_decoding_is_nobody_elses_work_wherever_prompts_are_read():
    decoding = Loads(prefill=0.5, decode=1.6)
    assert pressure(3, 1, decoding, decoders_read=True) == 1.6
    assert pressure(2, 2, decoding, decoders_read=True) == 0.8
