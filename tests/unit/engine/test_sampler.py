"""Sampling is exact, reproducible, and right at the ends of every parameter's range."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from core.errors import Internal
from core.messages import SamplingParams, TokenBias
from engine.sampler import sample
from engine.step_batch import SampleRequest

VOCAB = 1000


def request(
    position: int = 0, prompt: tuple[int, ...] = (), generated: tuple[int, ...] = (), **params: Any
) -> SampleRequest:
    return SampleRequest(
        params=SamplingParams(**params),
        position=position,
        prompt_token_ids=prompt,
        generated_token_ids=generated,
    )


def logits_of(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float32)


def draws(logits: torch.Tensor, count: int, **params: Any) -> np.ndarray:
    requests = [request(position=i, **params) for i in range(count)]
    return np.array(sample(logits.expand(count, -1).clone(), requests))


def random_logits(seed: int = 3, vocab: int = VOCAB, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(1, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def expected_distribution(logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    """The filters written out naively, over the whole sorted vocabulary."""
    row = logits[0].double().numpy() / params.temperature
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    probability = np.exp(row - row.max())
    kept = order[: params.top_k] if params.top_k else order
    if params.top_p < 1.0:
        mass, total, prefix = 0.0, sum(probability[kept]), []
        for token in kept:
            prefix.append(token)
            mass += probability[token]
            if mass >= params.top_p * total:
                break
        kept = prefix
    kept = [token for token in kept if probability[token] >= params.min_p]
    result = np.zeros(len(row))
    result[kept] = probability[kept] / probability[kept].sum()
    return result


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 4.0},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 3.0, "top_k": 400},
        {"temperature": 1.0, "top_p": 0.7},
        {"temperature": 6.0, "top_p": 0.95},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 9.0, "min_p": 0.3},
        {"temperature": 2.0, "top_k": 50, "top_p": 0.8, "min_p": 0.05},
    ],
)
def test_draws_follow_the_filtered_distribution(params: dict[str, Any]) -> None:
    logits = random_logits()
    count = 1500
    expected = expected_distribution(logits, SamplingParams(**params))
    seen = np.bincount(draws(logits, count, seed=11, **params), minlength=VOCAB)

    assert seen[expected == 0].sum() == 0
    # Chi square over the tokens that are expected often enough, the others as one class.
    often = expected * count >= 5
    classes = [*expected[often] * count, max(expected[~often].sum() * count, 1e-9)]
    counts = [*seen[often], seen[~often].sum()]
    if classes[-1] < 5:
        classes, counts = classes[:-1], counts[:-1]
    chi2 = sum((c - e) ** 2 / e for c, e in zip(counts, classes, strict=True))
    freedom = max(len(classes) - 1, 1)
    assert chi2 < freedom + 5 * math.sqrt(2 * freedom) + 5


@pytest.mark.parametrize("scale", [0.01, 1.0, 8.0])
@pytest.mark.parametrize("top_k", [0, 40])
def test_a_draw_is_the_inverse_cdf_in_order_of_id(scale: float, top_k: int) -> None:
    """Rounded logits tie often; which of the equals a filter leaves is settled by id."""
    from engine.philox import uniform

    logits = random_logits(seed=5, scale=scale).bfloat16().float()
    by_logit = sorted(range(VOCAB), key=lambda i: (-float(logits[0, i]), i))
    kept = sorted(by_logit[: top_k or VOCAB])
    sums = np.cumsum(torch.exp(logits[0] - logits.max()).double().numpy()[kept])
    wanted = [
        kept[int(np.searchsorted(sums, uniform(9, 0, position) * sums[-1], side="right"))]
        for position in range(300)
    ]
    assert draws(logits, 300, seed=9, top_k=top_k).tolist() == wanted


def test_neighbours_that_swap_places_by_rounding_move_no_token() -> None:
    """What a batch of another size does to the logits must not show in seeded draws."""
    logits = random_logits(seed=6, scale=3.0)
    noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)) * 1e-6
    exact, rounded = draws(logits, 2000, seed=4), draws(logits + noise, 2000, seed=4)
    assert (exact != rounded).sum() <= 1


def test_a_token_does_not_depend_on_its_batch() -> None:
    rows = torch.cat([random_logits(seed) for seed in range(8)])
    requests = [
        request(
            position=40 + i, seed=i, temperature=0.3 * i, top_p=0.9, prompt=(1, 2), generated=(3,)
        )
        for i in range(8)
    ]
    together = sample(rows.clone(), requests)
    alone = [sample(rows[i : i + 1].clone(), [requests[i]])[0] for i in range(8)]
    backwards = sample(rows.flip(0).clone(), requests[::-1])[::-1]
    assert together == alone == backwards


def test_greedy_takes_the_first_of_equal_logits() -> None:
    assert sample(logits_of(1.0, 5.0, 5.0), [request(temperature=0.0)]) == [1]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1e-7},
        {"temperature": 1e-300},
        {"temperature": 1e6, "top_k": 1},
        {"temperature": 1.0, "top_p": 1e-12},
        {"temperature": 1.0, "min_p": 1.0},
        {"temperature": 1e6, "top_p": 1e-9, "top_k": 10**6},
    ],
)
def test_extremes_keep_the_best_token(params: dict[str, Any]) -> None:
    logits = random_logits()
    assert set(draws(logits, 50, **params).tolist()) == {int(logits.argmax())}


def test_a_huge_temperature_spreads_over_the_vocabulary() -> None:
    assert len(set(draws(random_logits(), 500, temperature=1e6).tolist())) > 300


def test_top_k_beyond_the_vocabulary_is_no_filter() -> None:
    logits = random_logits(vocab=7)
    plain = draws(logits, 200, seed=4, temperature=2.0)
    assert (draws(logits, 200, seed=4, temperature=2.0, top_k=10**6) == plain).all()


def test_min_p_of_one_keeps_all_of_the_best() -> None:
    logits = logits_of(3.0, 1.0, 3.0, -2.0)
    assert set(draws(logits, 100, min_p=1.0).tolist()) == {0, 2}


@pytest.mark.parametrize(
    ("penalty", "winner"), [(1.5, 1), (0.5, 0), (1e-30, 0), (1e30, 1), (1.0, 0)]
)
def test_repetition_penalty_divides_what_prompt_and_answer_hold(
    penalty: float, winner: int
) -> None:
    logits = logits_of(4.0, 3.5, -1.0)
    ask = request(temperature=0.0, repetition_penalty=penalty, prompt=(0,), generated=(2,))
    assert sample(logits, [ask]) == [winner]
    assert bool(torch.isfinite(logits).all())


def test_repetition_penalty_pushes_negative_logits_down() -> None:
    ask = request(temperature=0.0, repetition_penalty=2.0, prompt=(0,))
    assert sample(logits_of(-1.0, -1.5), [ask]) == [1]


def test_extreme_penalties_still_sample() -> None:
    for penalty in (1e-30, 1e-310, 1e30):
        logits = random_logits(vocab=50)
        ask = request(temperature=0.7, repetition_penalty=penalty, prompt=tuple(range(25)))
        assert 0 <= sample(logits, [ask])[0] < 50


def test_presence_counts_once_and_frequency_counts_each() -> None:
    once = request(temperature=0.0, presence_penalty=0.4, generated=(0, 0, 0))
    each = request(temperature=0.0, frequency_penalty=0.4, generated=(0, 0, 0))
    assert sample(logits_of(2.0, 1.0), [once]) == [0]
    assert sample(logits_of(2.0, 1.0), [each]) == [1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_are_an_error_and_not_a_token(temperature: float) -> None:
    with pytest.raises(Internal, match="not finite"):
        sample(logits_of(1.0, float("nan")), [request(temperature=temperature)])


def test_a_bias_moves_single_tokens_before_everything_else() -> None:
    up = request(temperature=0.0, logit_bias=(TokenBias(token_id=2, bias=1.5),))
    assert sample(logits_of(2.0, 1.0, 1.0), [up]) == [2]
    never = request(temperature=0.0, logit_bias=(TokenBias(token_id=0, bias=-100.0),))
    assert sample(logits_of(2.0, 1.0, 0.5), [never]) == [1]
    # The penalty halves the biased logit, not the model's: 2 + 2 over 2 is below 2.1.
    both = request(
        temperature=0.0,
        prompt=(0,),
        repetition_penalty=2.0,
        logit_bias=(TokenBias(token_id=0, bias=2.0),),
    )
    assert sample(logits_of(2.0, 2.1), [both]) == [1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_banned_is_not_sampled_unless_nothing_else_is_left(temperature: float) -> None:
    params = SamplingParams(temperature=temperature)
    some = SampleRequest(params=params, position=0, banned_token_ids=(0, 2))
    assert sample(logits_of(9.0, 1.0, 9.0), [some]) == [1]
    every = SampleRequest(params=params, position=0, banned_token_ids=(0, 1, 2))
    assert sample(logits_of(9.0, 1.0, 9.0), [every])[0] in (0, 1, 2)


def test_choices_of_one_seed_differ_and_each_is_reproducible() -> None:
    logits = random_logits().expand(40, -1)
    drawn = [
        sample(
            logits.clone(),
            [
                SampleRequest(params=SamplingParams(seed=5), position=i, choice=choice)
                for i in range(40)
            ],
        )
        for choice in (0, 1, 1)
    ]
    assert drawn[0] != drawn[1]
    assert drawn[1] == drawn[2]
