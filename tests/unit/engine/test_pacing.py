"""Prompts beside decoding: as many tokens as the target leaves, never none."""

import pytest

from engine.pacing import StepPacer


def taught(target_s: float | None = 0.05) -> StepPacer:
    """Knows 5 ms for a step, 2 ms for each sequence in it, and 1 ms for a prompt token."""
    pacer = StepPacer(target_s=target_s, max_tokens=512)
    for step in range(60):
        decodes, tokens = 1 + step % 4, 16 + 7 * (step % 5)
        pacer.observe(num_decodes=decodes, num_prompt_tokens=0, compute_s=0.005 + 0.002 * decodes)
        pacer.observe(
            num_decodes=decodes,
            num_prompt_tokens=tokens,
            compute_s=0.005 + 0.002 * decodes + 0.001 * tokens,
        )
    return pacer


def step_s(decodes: int, tokens: int, before: int) -> float:
    """Of a machine on which attention counts."""
    pairs = tokens * (before + tokens / 2)
    return 0.006 + 1e-5 * decodes + 2e-5 * tokens + 2e-9 * pairs


def test_a_step_takes_what_the_target_leaves() -> None:
    pacer = taught()
    assert [pacer.max_prompt_tokens(n) for n in (0, 1, 4)] == pytest.approx([45, 43, 37], abs=1)
    assert pacer.prompt_tokens_per_s(4) == pytest.approx(37 / 0.05, rel=0.02)


def test_steps_keep_to_the_target_at_a_prompts_beginning_and_far_behind_it() -> None:
    pacer = StepPacer(target_s=0.03, max_tokens=8192)
    pacer.observe(num_decodes=0, num_prompt_tokens=64, compute_s=step_s(0, 64, 0))
    taken = []
    for step in range(400):
        decodes, before = 1 + step % 50, 1000 * (step % 9)
        pacer.observe(num_decodes=decodes, num_prompt_tokens=0, compute_s=step_s(decodes, 0, 0))
        tokens = pacer.max_prompt_tokens(decodes, num_before=before)
        if step % 3 == 0:  # a prompt's short end
            tokens = min(tokens, 40)
        compute_s = step_s(decodes, tokens, before)
        pacer.observe(
            num_decodes=decodes,
            num_prompt_tokens=tokens,
            compute_s=compute_s,
            num_pairs=tokens * (before + tokens / 2),
        )
        if step >= 100 and step % 3:
            taken.append(compute_s)
    assert min(taken) > 0.028
    assert max(taken) < 0.032


def test_who_has_waited_for_a_step_gets_a_shorter_one() -> None:
    pacer = taught()
    assert pacer.max_prompt_tokens(1, waited_s=0.02) == pytest.approx(23, abs=1)
    # However long: half of the target is left, and the prompt gets on.
    assert pacer.max_prompt_tokens(1, waited_s=9.0) == pytest.approx(18, abs=1)


def test_a_prompt_gets_on_though_decoding_alone_takes_longer_than_the_target() -> None:
    assert taught(0.012).max_prompt_tokens(4) == 16


def test_without_a_target_a_step_is_full() -> None:
    assert taught(None).max_prompt_tokens(4) == 512


def test_nothing_known_is_a_gentle_start_and_no_promise() -> None:
    pacer = StepPacer(target_s=0.05, max_tokens=512)
    assert pacer.max_prompt_tokens(3) == 16
    assert pacer.prompt_tokens_per_s(3) == 0.0


def test_a_slower_machine_is_noticed_within_some_steps() -> None:
    pacer = taught()
    for _ in range(15):
        pacer.observe(num_decodes=0, num_prompt_tokens=20, compute_s=0.080)
    assert pacer.max_prompt_tokens(0) in range(12, 18)


def test_a_target_that_is_no_time_is_refused() -> None:
    with pytest.raises(ValueError):
        StepPacer(target_s=0.0, max_tokens=8)
