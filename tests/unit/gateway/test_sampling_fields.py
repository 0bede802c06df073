"""Every sampling field arrives at the engine as it was asked, or is refused by its name."""

import pytest

from core.messages import StopReason, TokenBias

ASKED = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.05,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.1,
    "seed": -3,
    "stop_token_ids": [5, 6, 5],
    "ignore_eos": True,
    "min_tokens": 2,
    "max_tokens": 9,
    "logit_bias": {"7": -100, "8": 2.5},
}


@pytest.mark.parametrize("route", ["chat", "complete"])
async def test_all_of_them_reach_the_engine(http, backend, route):
    assert (await getattr(http, route)(**ASKED)).status == 200
    (job,) = backend.jobs
    sampling = job.sampling
    for name in set(ASKED) - {"max_tokens", "stop_token_ids", "logit_bias"}:
        assert getattr(sampling, name) == ASKED[name], name
    assert sampling.max_new_tokens == 9
    assert sampling.stop_token_ids == (5, 6)
    assert sampling.logit_bias == (
        TokenBias(token_id=7, bias=-100.0),
        TokenBias(token_id=8, bias=2.5),
    )


async def test_the_least_length_is_held_against_the_most(http, backend):
    error = (await http.chat(min_tokens=10, max_tokens=9)).error
    assert (error["param"], error["code"]) == ("min_tokens", "invalid_request")
    assert "9" in error["message"]
    assert (await http.chat(min_tokens=9, max_tokens=9)).status == 200
    assert (await http.complete(min_tokens=2**40)).error["param"] == "min_tokens"
    assert (await http.complete(min_tokens=-1)).error["param"] == "min_tokens"


async def test_stop_strings_are_not_looked_for_among_the_first_tokens(http, backend, tokenizer):
    backend.say("stop and stop and stop", reason=StopReason.LENGTH)
    first = len(tokenizer.encode_plain("stop and"))
    answer = (await http.complete(stop=["stop"])).json()["choices"][0]
    assert answer["text"] == ""
    answer = (await http.complete(stop=["stop"], min_tokens=first)).json()["choices"][0]
    assert (answer["text"], answer["finish_reason"]) == ("stop and ", "stop")


@pytest.mark.parametrize(
    "bias, field",
    [
        ({"49152": 1}, "logit_bias.49152"),
        ({"-1": 1}, "logit_bias.-1"),
        ({"07": 1}, "logit_bias.07"),
        ({"seven": 1}, "logit_bias.seven"),
        ({"7": 100.5}, "logit_bias.7"),
        ({"7": "1"}, "logit_bias.7"),
        ({str(i): 1 for i in range(1025)}, "logit_bias"),
    ],
)
async def test_a_bias_that_is_none_is_refused(http, backend, bias, field):
    error = (await http.chat(logit_bias=bias)).error
    assert (error["param"], error["code"]) == (field, "invalid_request")
    assert backend.jobs == []
