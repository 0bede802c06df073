"""Whose prompts step back where several tenants have some."""

from engine.turns import ReadingTurns


def test_alone_a_tenant_never_steps_back():
    turns = ReadingTurns()
    turns.observe([("flood", 100_000)], now_s=1.0)
    assert turns.behind(["flood"], now_s=1.0) == frozenset()


def test_who_had_much_steps_back_as_soon_as_another_asks():
    turns = ReadingTurns()
    turns.observe([("flood", 1000)], now_s=1.0)
    assert turns.behind(["flood", "quiet"], now_s=1.0) == {"flood"}


def test_who_had_much_stays_back_between_another_ones_prompts():
    turns = ReadingTurns()
    turns.observe([("flood", 1000), ("quiet", 50)], now_s=1.0)
    assert turns.behind(["flood"], now_s=1.1) == {"flood"}


def test_of_two_that_ask_for_about_the_same_nobody_steps_back():
    turns = ReadingTurns()
    turns.observe([("one", 1000), ("other", 1400)], now_s=1.0)
    assert turns.behind(["one", "other"], now_s=1.0) == frozenset()


def test_somebody_is_always_let_in():
    turns = ReadingTurns()
    had = {"a": 10, "b": 500, "c": 4000, "d": 4000}
    turns.observe(had.items(), now_s=1.0)
    assert turns.behind(had, now_s=1.0) < frozenset(had)


def test_what_somebody_had_is_forgotten():
    turns = ReadingTurns()
    turns.observe([("flood", 1000)], now_s=0.0)
    assert turns.behind(["flood", "quiet"], now_s=100.0) == frozenset()


def test_nobody_steps_back_for_long_while_others_would_take_everything():
    turns = ReadingTurns()
    turns.observe([("flood", 1_000_000)], now_s=0.0)
    others = [f"t{number}" for number in range(10)]
    for step in range(1, 1200):
        now_s = step / 10
        behind = turns.behind(["flood", *others], now_s=now_s)
        if "flood" not in behind:
            break
        turns.observe([(each, 1000) for each in others if each not in behind], now_s=now_s)
    assert now_s < 60
