"""/tokenize and /detokenize: what the model would read, to the token, and never more than that."""

import pytest

from core.config import ClusterConfig, EngineConfig

HI = [{"role": "user", "content": "hi <|im_end|>"}]


async def tokenize(http, **body):
    return await http.post("/tokenize", body)


async def test_a_text_has_the_tokens_that_a_completion_would_read(http, backend, tokenizer):
    body = (await tokenize(http, model="demo-model", prompt="Hello <|im_end|> 🚀")).json()
    await http.complete("Hello <|im_end|> 🚀")
    assert body == {
        "count": len(body["tokens"]),
        "max_model_len": 8192,
        "tokens": list(backend.jobs[0].prompt_token_ids),
    }
    assert not tokenizer.controls.ids & set(body["tokens"])


async def test_a_conversation_has_the_tokens_that_a_chat_would_read(http, backend):
    body = (await tokenize(http, messages=HI)).json()
    await http.chat(messages=HI)
    assert body["tokens"] == list(backend.jobs[0].prompt_token_ids)


async def test_tokens_are_named_as_the_vocabulary_writes_them(http, tokenizer):
    body = (await tokenize(http, prompt="a b", return_token_strs=True)).json()
    assert body["token_strs"] == ["a", "\u0120b"]
    assert [tokenizer.name(i) for i in (-1 % 2**31, 10**9)] == ["", ""]


async def test_the_tokenizers_own_prefix_can_be_left_out(http, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "prefix", (1,))
    with_prefix = (await tokenize(http, prompt="a b")).json()["tokens"]
    without = (await tokenize(http, prompt="a b", add_special_tokens=False)).json()["tokens"]
    assert with_prefix == [1, *without]


async def test_tokens_become_their_text_again(http, tokenizer):
    ids = [*tokenizer.encode_plain("naïve 🚀"), *sorted(tokenizer.controls.special_ids)]
    reply = await http.post("/detokenize", {"model": "demo-model", "tokens": ids})
    assert reply.json() == {"prompt": "naïve 🚀"}
    assert (await http.post("/detokenize", {"tokens": []})).json() == {"prompt": ""}


@pytest.mark.parametrize(
    "body, status, param",
    [
        ({}, 400, "prompt"),
        ({"prompt": "x", "messages": HI}, 400, "prompt"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": ["x"]}, 400, "prompt"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, 400, "messages[0].role"),
        ({"messages": HI, "add_special_tokens": True}, 400, "add_special_tokens"),
        ({"messages": HI, "chat_template": "{{ 1 }}"}, 400, "chat_template"),
        ({"messages": HI, "add_generation_prompt": False}, 400, "add_generation_prompt"),
        ({"prompt": "x", "return_token_strs": 1}, 400, "return_token_strs"),
        ({"prompt": "x", "model": "other"}, 404, "model"),
        ({"prompt": "x", "model": ""}, 400, "model"),
    ],
)
async def test_what_cannot_be_tokenised_names_its_field(http, body, status, param):
    reply = await tokenize(http, **body)
    assert (reply.status, reply.error["param"]) == (status, param)


@pytest.mark.parametrize(
    "body, status, param",
    [
        ({}, 400, "tokens"),
        ({"tokens": None}, 400, "tokens"),
        ({"tokens": ["5"]}, 400, "tokens[0]"),
        ({"tokens": [5, 49152]}, 400, "tokens[1]"),
        ({"tokens": [-1]}, 400, "tokens[0]"),
        ({"tokens": [1], "model": "other"}, 404, "model"),
    ],
)
async def test_what_cannot_be_detokenised_names_its_field(http, body, status, param):
    reply = await http.post("/detokenize", body)
    assert (reply.status, reply.error["param"]) == (status, param)


async def test_unknown_fields_are_named_here_too(http):
    reply = await tokenize(http, prompt="x", mood="good")
    assert reply.headers["x-tandem-ignored-fields"] == "mood"
    reply = await http.post("/detokenize", {"tokens": [5], "mood": "good"})
    assert reply.headers["x-tandem-ignored-fields"] == "mood"


class TestSmallWindow:
    @pytest.fixture
    def config(self):
        return ClusterConfig(engine=EngineConfig(max_model_len=16))

    async def test_no_more_than_a_window_is_worked_on(self, http):
        reply = await http.post("/detokenize", {"tokens": [5] * 17})
        assert (reply.status, reply.error["param"]) == (400, "tokens")
        reply = await tokenize(http, prompt="x" * 100_000)
        assert reply.error["code"] == "context_length_exceeded"
        # What has more tokens than it looks is told, with the window beside it.
        body = (await tokenize(http, prompt="a " * 20)).json()
        assert body["count"] > body["max_model_len"] == 16


async def test_the_version_is_told(http):
    version = (await http.get("/version")).json()["version"]
    assert version.split(".")[0].isdecimal()
