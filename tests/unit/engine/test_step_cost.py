"""What is told of a step's cost is what steps cost, however they come."""

import random

import pytest

from engine.pacing import StepPacer
from engine.step_cost import StepCostFit

BASE_S, DECODE_S, TOKEN_S, PAIR_S = 5e-3, 4e-4, 6e-4, 3e-7


def step_s(num_decodes, tokens, pairs):
    return BASE_S + DECODE_S * num_decodes + TOKEN_S * tokens + PAIR_S * pairs


def observed(steps, noise=0.0):
    rng = random.Random(1)
    fit = StepCostFit()
    for num_decodes, tokens, start in steps:
        pairs = tokens * (start + tokens / 2)
        took_s = step_s(num_decodes, tokens, pairs) * (1 + noise * rng.uniform(-1, 1))
        fit.observe(
            num_decodes=num_decodes, num_prompt_tokens=tokens, num_pairs=pairs, compute_s=took_s
        )
    return fit.cost()


def steps(seed=0, count=400):
    rng = random.Random(seed)
    for _ in range(count):
        if rng.random() < 0.5:
            yield rng.randint(1, 64), 0, 0
        else:
            yield rng.randint(0, 8), rng.randint(16, 512), rng.choice([0, 512, 2048, 4096])


def test_nothing_is_told_before_a_prompt_was_read():
    assert StepCostFit().cost() is None
    assert observed([(1, 0, 0), (4, 0, 0)]) is None


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_the_four_costs_are_found(noise):
    cost = observed(steps(), noise)
    within = 0.01 + 2 * noise
    assert cost.base_s == pytest.approx(BASE_S, rel=within)
    assert cost.decode_s == pytest.approx(DECODE_S, rel=within)
    assert cost.token_s == pytest.approx(TOKEN_S, rel=within)
    assert cost.pair_s == pytest.approx(PAIR_S, rel=2 * within)


def test_a_worker_that_never_decodes_has_the_base_of_its_prompts():
    cost = observed([(0, n, start) for n in (64, 512, 256, 17) for start in (0, 512, 1024, 2048)])
    assert cost.base_s == pytest.approx(BASE_S, rel=0.01)
    assert cost.decode_s == 0.0
    assert cost.pair_s == pytest.approx(PAIR_S, rel=0.05)


def test_a_few_noisy_steps_are_no_law_of_attention():
    cost = observed([(0, 64, 0), (1, 0, 0), (2, 6, 0), (3, 9, 100)], noise=0.9)
    assert cost.pair_s == 0.0
    assert 0.1 * TOKEN_S < cost.token_s < 10 * TOKEN_S


def test_no_cost_is_ever_below_nothing():
    """Longer steps of fewer tokens: a fit without bounds would pay for tokens."""
    fit = StepCostFit()
    for tokens, took_s in ((64, 0.05), (128, 0.04), (256, 0.03), (512, 0.02)):
        fit.observe(num_decodes=0, num_prompt_tokens=tokens, num_pairs=0.0, compute_s=took_s)
    cost = fit.cost()
    assert min(cost.base_s, cost.decode_s, cost.token_s, cost.pair_s) >= 0.0


def test_equal_steps_are_told_apart_by_nothing_and_still_add_up():
    cost = observed([(0, 512, 0)] * 20)
    told_s = cost.base_s + 512 * cost.token_s + 512 * 256 * cost.pair_s
    assert told_s == pytest.approx(step_s(0, 512, 512 * 256), rel=0.01)


def test_a_change_is_followed():
    fit = StepCostFit()
    for token_s in (1e-3, 2e-3):
        for n in range(300):
            tokens = 100 + 37 * (n % 9)
            fit.observe(
                num_decodes=0,
                num_prompt_tokens=tokens,
                num_pairs=0.0,
                compute_s=0.01 + token_s * tokens,
            )
    assert fit.cost().token_s == pytest.approx(2e-3, rel=0.02)


def test_the_pacer_learns_costs_from_the_steps_that_it_sees():
    pacer = StepPacer(target_s=0.05, max_tokens=512)
    assert pacer.cost.cost() is None
    pacer.observe(num_decodes=2, num_prompt_tokens=0, compute_s=0.01)
    pacer.observe(num_decodes=0, num_prompt_tokens=100, compute_s=0.06, num_pairs=5000.0)
    assert pacer.cost.cost() is not None
