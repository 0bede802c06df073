"""RB-O08, RB-O09: biases and log-probabilities, whose shapes clients take apart."""

import math
from dataclasses import replace

import pytest

from core.messages import TokenLogprobs

HI = [{"role": "user", "content": "yes or no"}]


class TestLogitBias:
    """RB-O08."""

    @pytest.mark.parametrize(
        "bias",
        [
            {"191222": -100, "99999": 5},
            {"AI": -100},
            {"-1": 5},
            {"3.0": 5},
            {"5": 1e9},
            {"5": -100.1},
            {"5": None},
            {"5": "1"},
            {"5": True},
            [5],
            {str(i): 1 for i in range(30_000)},
        ],
    )
    async def test_what_is_no_bias_is_refused_by_name(self, http, backend, bias):
        reply = await http.chat(logit_bias=bias)
        assert reply.status == 400
        assert reply.error["param"].startswith("logit_bias")
        assert backend.jobs == []

    async def test_the_ends_of_the_range_are_taken(self, http, backend):
        assert (await http.chat(logit_bias={"0": -100, "49151": 100})).status == 200
        assert len(backend.jobs) == 1


class TestLogprobs:
    """RB-O09."""

    @pytest.mark.parametrize("stream", [True, False])
    @pytest.mark.parametrize(
        "fields",
        [
            {"logprobs": False, "top_logprobs": 5},
            {"top_logprobs": 5},
            {"logprobs": True, "top_logprobs": 21},
            {"logprobs": True, "top_logprobs": -1},
            {"logprobs": 1},
        ],
    )
    async def test_what_contradicts_itself_or_is_too_much_is_refused(
        self, http, backend, fields, stream
    ):
        reply = await http.chat(stream=stream, **fields)
        assert reply.status == 400
        assert reply.error["param"] in ("logprobs", "top_logprobs")
        assert backend.jobs == []

    async def test_a_stream_has_the_entries_of_the_whole(self, http, backend):
        """One for each token that was generated, in the shape of a chat."""
        backend.say("🦙 yes")
        backend.script = [with_logprobs(batch) for batch in backend.script]
        asked = {"logprobs": True, "top_logprobs": 2}
        whole = (await http.chat(**asked)).json()["choices"][0]["logprobs"]["content"]
        chunks = (await http.chat(stream=True, **asked)).chunks
        streamed = [
            entry
            for chunk in chunks
            for choice in chunk["choices"]
            for entry in (choice["logprobs"] or {}).get("content") or []
        ]
        assert streamed == whole
        assert {frozenset(entry) for entry in whole} == {
            frozenset({"token", "logprob", "bytes", "top_logprobs"})
        }
        # Bytes are exact where a token is a part of a character.
        told = b"".join(bytes(entry["bytes"] or []) for entry in whole)
        assert told.decode() == "🦙 yes"

    async def test_what_cannot_be_is_told_in_valid_json(self, http, backend):
        backend.say("yes")
        backend.script = [with_logprobs(batch, -math.inf) for batch in backend.script]
        reply = await http.chat(logprobs=True, top_logprobs=2)
        assert reply.status == 200
        entries = reply.json()["choices"][0]["logprobs"]["content"]
        assert {entry["logprob"] for entry in entries} == {-9999.0}
        legacy = (await http.complete(logprobs=2)).json()["choices"][0]["logprobs"]
        assert set(legacy["token_logprobs"]) == {-9999.0}


def with_logprobs(batch, logprob=-0.5):
    """The batch with a log-probability of each token and of two others."""
    each = TokenLogprobs(logprob=logprob, top_token_ids=(5, 6), top_logprobs=(-0.1, logprob))
    return replace(batch, logprobs=(each,) * len(batch.token_ids))
