"""RB-O04 to RB-O08, RB-O16, RB-O18, RB-O19: what a body may hold, and what is said of the rest."""

import json
import time

import pytest

from core.config import ClusterConfig, EngineConfig

HI = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"


def body(**fields):
    return {"model": "demo-model", "messages": HI, **fields}


def refused(reply, param, status=400):
    assert reply.status == status, reply.body
    assert reply.error["param"] == param
    return reply.error


@pytest.fixture
async def still_serves(http, backend):
    """Whatever the test did, nothing is left running and the next request is answered."""
    yield
    jobs = len(backend.jobs)
    assert (await http.chat()).status == 200
    assert len(backend.jobs) == jobs + 1


@pytest.mark.usefixtures("still_serves")
class TestContentShapes:
    """RB-O04."""

    async def test_an_empty_prompt_or_conversation_is_refused(self, http, backend):
        refused(await http.complete(""), "prompt")
        refused(await http.chat(messages=[]), "messages")
        refused(await http.chat(""), "messages[0].content")
        refused(await http.chat([]), "messages[0].content")
        refused(await http.chat(messages=[{"role": "user"}]), "messages[0].content")
        assert backend.jobs == []

    async def test_null_is_content_of_nobody_who_called_no_tool(self, http, backend):
        refused(await http.chat(None), "messages[0].content")
        silent = [*HI, {"role": "assistant", "content": None}]
        refused(await http.chat(messages=silent), "messages[1].content")
        assert backend.jobs == []

    async def test_text_parts_are_their_texts_joined(self, http, backend):
        parts = [{"type": "text", "text": "part one"}, {"type": "text", "text": "part two"}]
        await http.chat(parts)
        await http.chat("part onepart two")
        assert backend.jobs[0].prompt_token_ids == backend.jobs[1].prompt_token_ids

    async def test_several_mistakes_name_one_field(self, http, backend):
        reply = await http.chat([], n=0, max_tokens=0, response_format={"type": ""})
        assert reply.status == 400 and reply.error["param"]
        assert backend.jobs == []


class TestTokenBudget:
    """RB-O05. A window of 64: prompt and answer must fit together, and nothing is clamped."""

    @pytest.fixture
    def config(self):
        return ClusterConfig(engine=EngineConfig(max_model_len=64))

    @pytest.mark.parametrize("stream", [True, False])
    @pytest.mark.parametrize(
        "prompt_tokens, limit, given",
        [(63, 1, 1), (8, 56, 56), (10, None, 54), (63, None, 1)],
    )
    async def test_what_fits_is_given(self, http, backend, stream, prompt_tokens, limit, given):
        reply = await http.complete([100] * prompt_tokens, max_tokens=limit, stream=stream)
        assert reply.status == 200
        assert backend.jobs[-1].sampling.max_new_tokens == given

    @pytest.mark.parametrize("stream", [True, False])
    @pytest.mark.parametrize(
        "prompt_tokens, limit", [(63, 2), (64, 1), (64, None), (8, 57), (10, 4294967297)]
    )
    async def test_what_does_not_is_refused_with_both_numbers(
        self, http, backend, stream, prompt_tokens, limit
    ):
        reply = await http.complete([100] * prompt_tokens, max_tokens=limit, stream=stream)
        assert reply.error["code"] == "context_length_exceeded"
        assert f"{prompt_tokens} tokens" in reply.error["message"]
        assert "64 tokens" in reply.error["message"]
        assert backend.jobs == []

    async def test_the_templates_tokens_count(self, http, backend):
        asked = await http.post("/tokenize", {"messages": HI})
        left = 64 - asked.json()["count"]
        assert (await http.chat(max_tokens=left, messages=HI)).status == 200
        reply = await http.chat(max_tokens=left + 1, messages=HI)
        assert reply.error["code"] == "context_length_exceeded"

    @pytest.mark.parametrize("limit", [0, -1])
    async def test_nothing_and_less_are_no_limits_of_a_chat(self, http, backend, limit):
        refused(await http.chat(max_tokens=limit), "max_tokens")
        refused(await http.chat(max_completion_tokens=limit), "max_completion_tokens")
        assert backend.jobs == []

    async def test_the_two_names_must_agree(self, http):
        refused(await http.chat(max_completion_tokens=5, max_tokens=7), "max_completion_tokens")
        assert (await http.chat(max_completion_tokens=5, max_tokens=5)).status == 200


class TestNumbers:
    """RB-O06."""

    @pytest.mark.parametrize(
        "field, literal",
        [
            ("temperature", "NaN"),
            ("temperature", "Infinity"),
            ("top_p", "-Infinity"),
            ("temperature", "1e999"),
            ("presence_penalty", '"NaN"'),
            ("temperature", '"0.7"'),
            ("temperature", "true"),
            ("max_tokens", "1.5"),
            ("max_tokens", '"16"'),
        ],
    )
    @pytest.mark.parametrize("stream", ["true", "false"])
    async def test_what_is_no_number_of_the_field_is_refused_by_name(
        self, http, backend, field, literal, stream
    ):
        raw = json.dumps(body())[:-1] + f', "stream": {stream}, "{field}": {literal}}}'
        refused(await http.post(CHAT, raw.encode()), field)
        assert backend.jobs == []


class TestSamplingExtremes:
    """RB-O07: the gateway's half; tests/integration/test_sampling_extremes.py has the model's."""

    @pytest.mark.parametrize(
        "field, value, taken",
        [
            ("temperature", 0, 0),
            ("temperature", 1e-7, 1e-7),
            ("temperature", 2.0, 2.0),
            ("top_p", 1e-9, 1e-9),
            ("top_k", -1, 0),
            ("top_k", 0, 0),
            ("top_k", 9_999_999, 49152),
            ("min_p", 1, 1),
            ("repetition_penalty", 1e-9, 1e-9),
        ],
    )
    async def test_the_ends_of_ranges_are_taken(self, http, backend, field, value, taken):
        assert (await http.complete("1 2 3", **{field: value})).status == 200
        assert getattr(backend.jobs[0].sampling, field) == taken

    @pytest.mark.parametrize(
        "field, value",
        [
            ("temperature", 1e6),
            ("top_p", 0),
            ("top_p", 1.0000001),
            ("top_k", -2),
            ("repetition_penalty", 1e9),
            ("repetition_penalty", 0),
        ],
    )
    async def test_what_is_beyond_them_is_refused(self, http, backend, field, value):
        refused(await http.complete("1 2 3", **{field: value}), field)
        assert backend.jobs == []


class TestSeeds:
    """RB-O08: a signed 64-bit integer."""

    @pytest.mark.parametrize("seed", [-1, 0, 2**63 - 1, -(2**63)])
    async def test_inside_nothing_wraps(self, http, backend, seed):
        assert (await http.chat(seed=seed)).status == 200
        assert backend.jobs[0].sampling.seed == seed

    @pytest.mark.parametrize("seed", [2**63, 2**64 - 1, 2**64, -(2**63) - 1, 1000.0, "7", True])
    async def test_outside_it_is_refused(self, http, backend, seed):
        refused(await http.chat(seed=seed), "seed")
        assert backend.jobs == []


class TestDepth:
    """RB-O16."""

    @pytest.mark.parametrize("field", ["x", "tools", "response_format", "metadata", "logit_bias"])
    async def test_ten_thousand_levels_are_refused_before_they_are_parsed(
        self, http, backend, field
    ):
        nested = "[" * 10_000 + "0" + "]" * 10_000
        raw = json.dumps(body())[:-1] + f', "{field}": {nested}}}'
        started_s = time.perf_counter()
        reply = await http.post(CHAT, raw.encode())
        assert time.perf_counter() - started_s < 1.0
        assert reply.status == 400
        assert "64 levels" in reply.error["message"]
        assert backend.jobs == []


class TestUnicode:
    """RB-O18."""

    @pytest.mark.parametrize("stream", ["true", "false"])
    @pytest.mark.parametrize(
        "raw, param",
        [
            (rb'{"messages":[{"role":"user","content":"a\ud800b"}]', "messages[0].content"),
            (rb'{"messages":[{"role":"tool","content":"x","tool_call_id":"\udc00"}]',
             "messages[0].tool_call_id"),
            (b'{"messages":[{"role":"user","content":"\xff\xfe"}]', None),
        ],
    )  # fmt: skip
    async def test_what_is_no_text_is_refused(self, http, backend, raw, param, stream):
        raw += b',"model":"demo-model","stream":' + stream.encode() + b"}"
        refused(await http.post(CHAT, raw), param)
        assert backend.jobs == []

    async def test_other_encodings_are_refused_and_a_mark_tolerated(self, http, backend):
        refused(await http.post(CHAT, json.dumps(body()).encode("utf-16")), None)
        marked = await http.post(CHAT, b"\xef\xbb\xbf" + json.dumps(body()).encode())
        assert marked.status == 200

    async def test_nul_and_both_spellings_of_a_letter_are_kept(self, http, backend, tokenizer):
        for text in ("a\x00b", "caf\u00e9", "cafe\u0301"):
            assert (await http.complete(text)).status == 200
        zero, composed, decomposed = (job.prompt_token_ids for job in backend.jobs)
        assert zero == tokenizer.encode_plain("a\x00b")
        assert composed != decomposed
        assert tokenizer.decode(decomposed) == "cafe\u0301"


class TestFieldsAndNames:
    """RB-O19."""

    async def test_a_misspelled_field_is_dropped_and_named(self, http):
        reply = await http.chat(max_token=5)
        assert reply.headers["x-tandem-ignored-fields"] == "max_token"

    async def test_the_insides_of_other_servers_are_dropped_and_named(self, http, backend):
        inside = {"kv_transfer_params": {"remote_block_ids": [1, 2]}, "bootstrap_host": "10.0.0.9"}
        reply = await http.chat(**inside)
        named = reply.headers["x-tandem-ignored-fields"].split(", ")
        assert named == ["kv_transfer_params", "bootstrap_host"]

    @pytest.mark.parametrize("model", ["alias-of-demo", "nope", "DEMO-MODEL ", "demo-model "])
    async def test_only_the_exact_name_is_served_and_it_is_told(self, http, backend, model):
        error = refused(await http.chat(model=model), "model", 404)
        assert error["code"] == "model_not_found"
        assert "demo-model" in error["message"]

    async def test_a_key_that_stands_twice_is_refused(self, http):
        raw = json.dumps(body())[:-1] + ', "temperature": 0, "temperature": 2}'
        refused(await http.post(CHAT, raw.encode()), "temperature")
