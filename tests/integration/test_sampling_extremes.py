"""RB-O07: the ends of every sampling range, on the real model: text each time, and never NaN."""

import itertools

import httpx
import pytest

pytestmark = pytest.mark.slow

PROMPT = "1 2 3 4 5 "
GREEDY = ({"temperature": 0}, {"temperature": 1e-7}, {"temperature": 1e-4}, {"top_k": 1})


@pytest.fixture(scope="module")
def complete(cluster):
    with httpx.Client(base_url=cluster.http_url, timeout=60, trust_env=False) as client:

        def ask(**fields):
            body = {"model": "smollm2-135m-instruct", "prompt": PROMPT, "max_tokens": 6, "seed": 7}
            reply = client.post("/v1/completions", json=body | fields)
            assert reply.status_code == 200, reply.text
            (choice,) = reply.json()["choices"]
            return choice["text"], reply.json()["usage"]["completion_tokens"]

        yield ask


def test_almost_no_temperature_is_none_whatever_else_is_said(complete):
    expected = complete(temperature=0)
    assert expected[0] and expected[1] == 6
    others = ({}, {"top_p": 1e-9}, {"top_k": 9_999_999}, {"min_p": 1}, {"top_p": 1, "top_k": -1})
    for greedy, other in itertools.product(GREEDY, others):
        assert complete(**(other | greedy)) == expected


def test_the_far_ends_still_give_tokens(complete):
    for fields in (
        {"temperature": 2, "top_p": 1e-9},
        {"temperature": 2, "min_p": 1},
        {"temperature": 2, "repetition_penalty": 1e-9},
        {"temperature": 2, "repetition_penalty": 10},
        {"temperature": 0, "presence_penalty": -2, "frequency_penalty": -2},
        {"temperature": 0, "presence_penalty": 2, "frequency_penalty": 2},
    ):
        text, tokens = complete(**fields)
        assert tokens == 6 and text
