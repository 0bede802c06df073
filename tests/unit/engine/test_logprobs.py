"""Log probabilities are the model's own, exact in order, and cost only those who ask."""

import pytest
import torch

from core.messages import SamplingParams, TokenBias
from engine.logprobs import Logprobs
from engine.sampler import sample
from engine.step_batch import SampleRequest


def request(**params: object) -> SampleRequest:
    return SampleRequest(params=SamplingParams(**params), position=3)  # type: ignore[arg-type]


def test_they_are_told_of_the_token_and_of_the_likeliest_ones() -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(1))
    expected = logits.double().log_softmax(-1)
    asked = [request(logprobs=True, top_logprobs=5), request(logprobs=True)]
    first, second = Logprobs(logits, asked).of([7, 9])
    assert first is not None and second is not None
    assert first.logprob == pytest.approx(float(expected[0, 7]), abs=1e-6)
    top = expected[0].topk(5)
    assert first.top_token_ids == tuple(top.indices.tolist())
    assert first.top_logprobs == pytest.approx(top.values.tolist(), abs=1e-6)
    assert (second.top_token_ids, second.top_logprobs) == ((), ())
    assert second.logprob == pytest.approx(float(expected[1, 9]), abs=1e-6)


def test_they_are_of_the_model_whatever_the_sampler_makes_of_it() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(2))
    plain = Logprobs(logits.clone(), [request(logprobs=True, top_logprobs=3)]).of([4])
    bent = request(
        logprobs=True,
        top_logprobs=3,
        temperature=0.3,
        top_k=2,
        logit_bias=(TokenBias(token_id=4, bias=100.0),),
    )
    rows = logits.clone()
    asked = Logprobs(rows, [bent])
    assert sample(rows, [bent]) == [4]
    assert asked.of([4]) == plain


def test_rows_that_do_not_ask_get_none() -> None:
    logits = torch.randn(3, 20)
    asked = Logprobs(logits, [request(), request(logprobs=True), request()])
    first, second, third = asked.of([1, 2, 3])
    assert first is None and third is None
    assert second is not None


def test_equal_ones_are_told_by_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0]])
    (found,) = Logprobs(logits, [request(logprobs=True, top_logprobs=4)]).of([0])
    assert found is not None
    assert found.top_token_ids == (1, 3, 2, 4)


def test_more_likeliest_than_the_vocabulary_has_are_all_of_it() -> None:
    (found,) = Logprobs(torch.zeros(1, 3), [request(logprobs=True, top_logprobs=9)]).of([0])
    assert found is not None
    assert found.top_token_ids == (0, 1, 2)
