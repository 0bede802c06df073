"""What the scheduler measures itself is what happened."""

import pytest

from core.messages import Counter
from scheduler.measures import AnswerLength, DrainRate, LinkSpeed, Pace
from scheduler.shares import Shares


def test_the_drain_rate_is_of_the_time_in_which_something_waited():
    rate = DrainRate()
    rate.observe(0.0, served=50.0, waiting=False)
    assert rate.per_s == 0.0
    rate.observe(100.0, served=5.0, waiting=True)
    for second in range(1, 21):
        rate.observe(100.0 + second, served=30.0, waiting=True)
    assert rate.per_s == pytest.approx(30.0, rel=0.01)
    rate.observe(121.0, served=30.0, waiting=False)
    rate.observe(500.0, served=0.0, waiting=True)  # idle meanwhile: that says nothing
    assert rate.per_s == pytest.approx(30.0, rel=0.01)


def test_the_drain_rate_follows_a_change():
    rate = DrainRate()
    for second in range(61):
        rate.observe(float(second), served=100.0 if second < 30 else 10.0, waiting=True)
    assert 9 < rate.per_s < 20


def test_a_links_speed_is_bytes_over_the_time_in_which_they_were_sent():
    link = LinkSpeed()
    counters = [Counter(name="shm_bytes_sent", value=0), Counter(name="shm_busy_us", value=0)]
    link.observe(counters)
    assert link.bytes_per_s == 0.0
    link.observe(
        [Counter(name="shm_bytes_sent", value=4000), Counter(name="shm_busy_us", value=1000)]
    )
    assert link.bytes_per_s == pytest.approx(4e6)


def test_a_reader_that_is_slower_than_its_steps_is_expected_to_be():
    pace = Pace()
    for n in range(50):  # each begins when the one before is read, whenever it was placed
        pace.observe(placed_s=3.0 * n - 2.0, expected_s=1.0, now_s=3.0 * (n + 1))
    assert pace.factor == pytest.approx(3.0, rel=0.01)
    pace.observe(placed_s=200.0, expected_s=1.0, now_s=300.0)
    assert pace.factor <= 3.3, "one that was stuck says little"


def test_an_answers_length_is_learned_from_how_long_it_was_decoded():
    answers = AnswerLength()
    answers.observe(1.0, 0.0)
    assert answers.tokens == 0.0
    for _ in range(100):
        answers.observe(1.0, 0.01)
    assert answers.tokens == pytest.approx(101)


def test_alone_a_tenant_may_have_everything_and_beside_others_its_share():
    shares = Shares()
    shares.seen("a", now_s=0.0)
    assert shares.greedy({"a": 9}, now_s=1.0) == frozenset()
    shares.seen("b", now_s=2.0)
    assert shares.greedy({"a": 9}, now_s=2.0) == {"a"}
    assert shares.greedy({"a": 9, "b": 9}, now_s=3.0) == frozenset()
    assert shares.greedy({"a": 9, "b": 8}, now_s=4.0) == {"a"}
    assert shares.greedy({"a": 9}, now_s=80.0) == frozenset(), "b has not come back for a minute"
