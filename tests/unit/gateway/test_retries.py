"""Retries stay a small share of the traffic, and a prompt that costs workers is kept away."""

import pytest

from gateway.retries import Poison, RetryBudget


class Clock:
    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


def test_retries_stay_within_the_floor_and_the_share(clock):
    budget = RetryBudget(0.1, 3, clock)
    for _ in range(50):
        budget.request()
    assert sum(budget.take() for _ in range(100)) == 3 + 5


def test_the_budget_comes_back_with_time(clock):
    budget = RetryBudget(0.0, 2, clock)
    assert [budget.take() for _ in range(3)] == [True, True, False]
    clock.now_s += 61.0
    assert budget.take()


def test_a_prompt_that_cost_two_workers_is_refused_for_a_while(clock):
    poison = Poison(60.0, clock)
    poison.add("m", "acme", (1, 2, 3))
    clock.now_s += 20.0
    assert poison.remaining_s("m", "acme", (1, 2, 3)) == pytest.approx(40.0)
    assert poison.remaining_s("m", "acme", (1, 2)) == 0.0
    assert poison.remaining_s("m", "other", (1, 2, 3)) == 0.0
    clock.now_s += 41.0
    assert poison.remaining_s("m", "acme", (1, 2, 3)) == 0.0


def test_another_models_prompt_of_the_same_tokens_is_served(clock):
    poison = Poison(60.0, clock)
    poison.add("large", "acme", (1, 2, 3))
    assert poison.remaining_s("small", "acme", (1, 2, 3)) == 0.0
    assert poison.remaining_s("large", "acme", (1, 2, 3)) == pytest.approx(60.0)
