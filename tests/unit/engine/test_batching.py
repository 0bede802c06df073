"""What a step may take, and in which order."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.messages import SamplingParams, TransferId
from engine.batching import ScheduledChunk, StepBudget, plan_step
from engine.block_manager import BlockManager
from engine.sequence import Sequence


def sequence(
    name: str, prompt: int, computed: int = 0, generated: int = 0, tenant: str = ""
) -> Sequence:
    return Sequence(
        key=TransferId(request_id=name, attempt=0),
        token_ids=[5] * (prompt + generated),
        num_prompt_tokens=prompt,
        num_computed_tokens=computed,
        lease=BlockManager(64).acquire(16),
        sampling=SamplingParams(),
        cache_salt=tenant,
    )


def chunk(name: str, start: int, num_tokens: int, *, samples: bool) -> ScheduledChunk:
    key = TransferId(request_id=name, attempt=0)
    return ScheduledChunk(key=key, start=start, num_tokens=num_tokens, samples=samples)


def test_decodes_go_before_a_prompt_that_came_first() -> None:
    plan = plan_step(
        [sequence("long", 100), sequence("running", 7, computed=7, generated=1)],
        StepBudget(max_tokens=10, max_seqs=8),
    )
    assert plan.items == (
        chunk("running", 7, 1, samples=True),
        chunk("long", 0, 9, samples=False),
    )


def test_prompts_share_the_budget_first_come_first_served() -> None:
    plan = plan_step(
        [sequence("a", 6, computed=2), sequence("b", 5), sequence("c", 5)],
        StepBudget(max_tokens=8, max_seqs=8),
    )
    assert plan.items == (chunk("a", 2, 4, samples=True), chunk("b", 0, 4, samples=False))


def test_who_steps_back_is_read_when_nobody_else_waits_and_a_little_at_a_time() -> None:
    begun = sequence("begun", 900, computed=300, tenant="flood")
    guest = sequence("guest", 200, tenant="quiet")
    budget = StepBudget(max_tokens=1200, max_seqs=8)
    behind = frozenset({"flood"})
    beside = plan_step([begun, guest], budget, behind=behind)
    assert beside.items == (chunk("guest", 0, 200, samples=True),)
    alone = plan_step([begun], budget, behind=behind)
    assert alone.items == (chunk("begun", 300, 120, samples=False),)


def test_answers_of_who_steps_back_go_on() -> None:
    running = sequence("running", 7, computed=7, generated=1, tenant="flood")
    guest = sequence("guest", 5, tenant="quiet")
    plan = plan_step(
        [running, guest], StepBudget(max_tokens=10, max_seqs=8), behind=frozenset({"flood"})
    )
    assert plan.items == (chunk("running", 7, 1, samples=True), chunk("guest", 0, 5, samples=True))


def test_a_one_token_prompt_is_a_prompt() -> None:
    plan = plan_step([sequence("a", 9), sequence("b", 1)], StepBudget(max_tokens=9, max_seqs=2))
    assert plan.items == (chunk("a", 0, 9, samples=True),)


def test_an_adopted_sequence_decodes() -> None:
    adopted = sequence("a", 20, computed=20, generated=1)
    plan = plan_step([adopted], StepBudget(max_tokens=1, max_seqs=1))
    assert plan.items == (chunk("a", 20, 1, samples=True),)


def test_nothing_to_do_is_an_empty_plan() -> None:
    assert plan_step([], StepBudget(max_tokens=1, max_seqs=1)).items == ()


@pytest.mark.parametrize("budget", [(0, 1), (1, 0)])
def test_a_budget_without_room_is_refused(budget: tuple[int, int]) -> None:
    with pytest.raises(ValueError):
        StepBudget(max_tokens=budget[0], max_seqs=budget[1])


@st.composite
def sequences(draw: st.DrawFn) -> list[Sequence]:
    made = []
    for index in range(draw(st.integers(0, 12))):
        prompt, generated = draw(st.integers(1, 40)), draw(st.integers(0, 3))
        computed = draw(st.integers(0, prompt + generated - 1))
        made.append(sequence(str(index), prompt, computed, generated))
    return made


budgets = st.builds(
    lambda tokens, seqs: StepBudget(max_tokens=tokens, max_seqs=seqs),
    st.integers(1, 64),
    st.integers(1, 12),
)


@given(sequences(), budgets)
def test_a_plan_keeps_to_its_budget_and_makes_progress(
    waiting: list[Sequence], budget: StepBudget
) -> None:
    plan = plan_step(waiting, budget)

    assert plan.num_tokens <= budget.max_tokens
    assert len(plan.items) <= budget.max_seqs
    assert bool(plan.items) == bool(waiting)
    assert len({item.key for item in plan.items}) == len(plan.items)
    by_key = {each.key: each for each in waiting}
    for item in plan.items:
        of = by_key[item.key]
        assert item.start == of.num_computed_tokens
        assert item.num_tokens >= 1
        assert item.samples == (item.start + item.num_tokens == len(of.token_ids))


@given(sequences(), budgets)
def test_each_class_is_served_in_order_of_arrival(
    waiting: list[Sequence], budget: StepBudget
) -> None:
    keys = [item.key for item in plan_step(waiting, budget).items]
    decoding = [
        each.key
        for each in waiting
        if each.num_computed_tokens == len(each.token_ids) - 1 >= each.num_prompt_tokens
    ]
    prompts = [each.key for each in waiting if each.key not in decoding]
    taken = [key for key in keys if key in decoding]
    assert taken == decoding[: len(taken)]
    assert keys[len(taken) :] == [key for key in prompts if key in keys]
    if len(taken) < len(keys):
        assert taken == decoding
        assert prompts[0] in keys


def test_short_prompts_get_a_quarter_of_a_step_beside_a_long_one() -> None:
    plan = plan_step(
        [sequence("long", 200), sequence("b", 30), sequence("c", 9), sequence("d", 7)],
        StepBudget(max_tokens=64, max_seqs=8),
    )
    assert plan.items == (
        chunk("long", 0, 48, samples=False),
        chunk("c", 0, 9, samples=True),
        chunk("d", 0, 7, samples=True),
    )


def test_prompts_keep_to_their_own_budget_beside_decodes() -> None:
    plan = plan_step(
        [sequence("a", 7, computed=7, generated=1), sequence("long", 200)],
        StepBudget(max_tokens=64, max_seqs=8, max_prompt_tokens=20),
    )
    assert plan.items == (chunk("a", 7, 1, samples=True), chunk("long", 0, 20, samples=False))


@given(sequences(), budgets)
def test_repeated_steps_finish_every_sequence(waiting: list[Sequence], budget: StepBudget) -> None:
    total = sum(len(each.token_ids) - each.num_computed_tokens for each in waiting)
    left = {each.key: each for each in waiting}
    for _ in range(total):
        for item in plan_step(left.values(), budget).items:
            left[item.key] = replace(left[item.key])
            if item.samples:
                del left[item.key]
            else:
                left[item.key].num_computed_tokens += item.num_tokens
    assert not left
