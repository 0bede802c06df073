"""The prompt's log probabilities: the older shape of completions, vLLM's, and over gRPC."""

from dataclasses import replace

import pytest

from core.config import ClusterConfig, GatewayConfig
from core.messages import TokenLogprobs
from gateway.echo import echo_of
from protos.tandem.v1 import inference_pb2 as pb
from tests.unit.gateway.test_grpc_service import Context, call, chat, generate, refused

__all__ = ["call"]  # a fixture
PROMPT = "The cap\u00edtal"


@pytest.fixture
def told(backend, tokenizer):
    """Scripts log probabilities for the prompt and each token of the answer."""
    ids = tokenizer.encode_plain(PROMPT)
    prompt = tuple(
        TokenLogprobs(logprob=-float(i), top_token_ids=(5, 6), top_logprobs=(-0.5, -1.5))
        for i in range(1, len(ids))
    )
    own = TokenLogprobs(logprob=-0.25, top_token_ids=(5, 6), top_logprobs=(-0.25, -1.5))
    backend.script = [
        replace(step, logprobs=(own,) * len(step.token_ids)) for step in backend.script
    ]
    backend.script[0] = replace(backend.script[0], prompt_logprobs=prompt)
    return ids


def check(logprobs, text, ids, num_answer):
    names = logprobs["tokens"]
    assert len(names) == len(ids) + num_answer
    assert {len(each) for each in logprobs.values()} == {len(names)}
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1 : len(ids)] == [-float(i) for i in range(1, len(ids))]
    assert logprobs["token_logprobs"][len(ids)] == -0.25
    assert all(set(logprobs["top_logprobs"][i]) >= {names[i]} for i in range(1, len(names)))
    for name, offset in zip(names, logprobs["text_offset"], strict=True):
        if not name.startswith("bytes:"):
            assert text[offset:].startswith(name) or name == "<|im_end|>"


@pytest.mark.parametrize("n", [1, 2])
async def test_echo_with_logprobs_tells_prompt_and_answer(http, backend, told, n):
    reply = (await http.complete(PROMPT, echo=True, logprobs=2, n=n)).json()
    assert len(reply["choices"]) == n
    for choice in reply["choices"]:
        assert choice["text"] == f"{PROMPT}Paris is the capital."
        check(choice["logprobs"], choice["text"], told, len(backend.script))
    sampling = backend.jobs[-1].sampling
    assert sampling.prompt_logprobs and sampling.top_prompt_logprobs == 2


@pytest.mark.parametrize("inline", [0, 10_000])
async def test_a_stream_tells_the_prompt_first_and_the_same_in_all(
    http, backend, told, monkeypatch, inline
):
    """Also where it is long, and put into words beside the event loop."""
    monkeypatch.setattr("gateway.http_generation._INLINE_LOGPROBS", inline)
    whole = (await http.complete(PROMPT, echo=True, logprobs=2, n=2)).json()["choices"]
    chunks = (await http.complete(PROMPT, echo=True, logprobs=2, n=2, stream=True)).chunks
    for choice in whole:
        mine = [each for chunk in chunks for each in chunk["choices"]]
        mine = [each for each in mine if each["index"] == choice["index"]]
        assert mine[0]["text"] == PROMPT
        for name, values in choice["logprobs"].items():
            pieces = [each["logprobs"][name] for each in mine if each["logprobs"]]
            assert [value for piece in pieces for value in piece] == values


async def test_without_echo_or_logprobs_the_prompt_is_not_scored(http, backend):
    for fields in ({"echo": True}, {"logprobs": 1}, {}):
        assert (await http.complete(PROMPT, **fields)).status == 200
        assert not backend.jobs[-1].sampling.prompt_logprobs


async def test_prompts_of_token_ids_are_told_too(http, backend, told):
    choice = (await http.complete(list(told), echo=True, logprobs=2)).json()["choices"][0]
    assert choice["text"].startswith(PROMPT)
    check(choice["logprobs"], choice["text"], told, len(backend.script))


def by_rank(found, spell):
    """The script's distribution in vLLM's shape, behind the first token."""
    assert found[0] is None
    for i, entry in enumerate(found[1:], start=1):
        for token_id, rank, logprob in (("5", 1, -0.5), ("6", 2, -1.5)):
            told = {"logprob": logprob, "rank": rank, "decoded_token": spell(int(token_id))[0]}
            assert entry[token_id] == told
        own = [each for name, each in entry.items() if name not in ("5", "6")]
        assert [(each["logprob"], each["rank"]) for each in own] == [(-float(i), None)]


async def test_vllms_field_tells_a_completions_prompt_in_each_choice(
    http, backend, told, tokenizer
):
    reply = (await http.complete(PROMPT, prompt_logprobs=2, n=2)).json()
    for choice in reply["choices"]:
        assert len(choice["prompt_logprobs"]) == len(told)
        by_rank(choice["prompt_logprobs"], tokenizer.spelled)
        assert choice["text"] == "Paris is the capital."
    assert backend.jobs[-1].sampling.top_prompt_logprobs == 2


async def test_vllms_field_tells_a_chats_prompt_beside_its_choices(http, backend, tokenizer):
    plain = await http.chat()
    assert "prompt_logprobs" not in plain.json()
    each = TokenLogprobs(logprob=-2.0, top_token_ids=(5,), top_logprobs=(float("-inf"),))
    count = len(backend.jobs[-1].prompt_token_ids) - 1
    backend.script[0] = replace(backend.script[0], prompt_logprobs=(each,) * count)
    for asked in (0, 1):
        found = (await http.chat(prompt_logprobs=asked, n=2)).json()
        first, *others = found["prompt_logprobs"]
        assert first is None and len(others) == count
        assert all(entry["5"]["logprob"] == -9999.0 for entry in others)
        assert all("prompt_logprobs" not in choice for choice in found["choices"])
        assert backend.jobs[-1].sampling.top_prompt_logprobs == asked
    ids = backend.jobs[-1].prompt_token_ids
    assert [str(i) in entry for i, entry in zip(ids[1:], others, strict=True)] == [True] * count


async def test_a_prompt_of_one_token_has_nothing_to_tell(http, backend):
    choice = (await http.complete([5], prompt_logprobs=1)).json()["choices"][0]
    assert choice["prompt_logprobs"] == [None]


async def test_echo_without_logprobs_repeats_the_text_alone(http, backend):
    choice = (await http.complete(PROMPT, echo=True, prompt_logprobs=2)).json()["choices"][0]
    assert choice["text"].startswith(PROMPT) and choice["logprobs"] is None
    assert len(choice["prompt_logprobs"]) == len(backend.jobs[-1].prompt_token_ids)


async def test_both_fields_of_the_prompt_must_agree(http, backend, told):
    error = (await http.complete(PROMPT, echo=True, logprobs=2, prompt_logprobs=1)).error
    assert error["param"] == "prompt_logprobs"
    choice = (await http.complete(PROMPT, echo=True, logprobs=2, prompt_logprobs=2)).json()
    check(choice["choices"][0]["logprobs"], choice["choices"][0]["text"], told, len(backend.script))
    assert len(choice["choices"][0]["prompt_logprobs"]) == len(told)


@pytest.mark.parametrize("value", [-1, 21, True, "x", 1.5])
async def test_what_is_no_number_of_them_is_refused_by_name(http, backend, value):
    for send in (http.chat, http.complete):
        assert (await send(prompt_logprobs=value)).error["param"] == "prompt_logprobs"
    assert backend.jobs == []


async def test_a_stream_does_not_tell_them(http, backend):
    for send in (http.chat, http.complete):
        error = (await send(prompt_logprobs=0, stream=True)).error
        assert (error["param"], error["code"]) == ("prompt_logprobs", "unsupported")
    assert backend.jobs == []


class TestBounds:
    @pytest.fixture
    def config(self):
        return ClusterConfig(gateway=GatewayConfig(max_prompt_logprobs=11))

    async def test_what_would_be_too_many_is_refused_by_name(self, http, backend, call):
        error = (await http.complete([5, 6, 7, 8], echo=True, logprobs=2)).error
        assert (
            error["param"] == "logprobs" and "12 log probabilities; at most 11" in error["message"]
        )
        backend.script[0] = replace(
            backend.script[0], prompt_logprobs=(TokenLogprobs(logprob=-1.0),) * 2
        )
        assert (await http.complete([5, 6, 7], echo=True, logprobs=2)).status == 200
        request = generate(text=PROMPT * 4, sampling=pb.SamplingOptions(prompt_logprobs=2))
        assert (await refused(call, "Generate", request)).violation.field == "prompt_logprobs"
        assert len(backend.jobs) == 1


async def test_grpc_tells_them_before_the_first_delta_in_bounded_messages(call, backend, tokenizer):
    backend.script[0] = replace(
        backend.script[0],
        prompt_logprobs=tuple(
            TokenLogprobs(logprob=-float(i), top_token_ids=(4,), top_logprobs=(-0.5,))
            for i in range(1, 2500)
        ),
    )
    for method, request in (
        ("Chat", chat("hi", prompt_logprobs=1)),
        ("Generate", generate(text="hi", sampling=pb.SamplingOptions(prompt_logprobs=1))),
    ):
        events = await call(method, request, Context())
        kinds = [event.WhichOneof("event") for event in events]
        assert kinds[:4] == ["prompt_logprobs"] * 3 + ["delta"]
        assert "prompt_logprobs" not in kinds[3:]
        pieces = [event.prompt_logprobs for event in events[:3]]
        assert [piece.start for piece in pieces] == [1, 1025, 2049]
        found = [each for piece in pieces for each in piece.logprobs]
        assert [each.logprob for each in found] == [-float(i) for i in range(1, 2500)]
        assert backend.jobs[-1].sampling.top_prompt_logprobs == 1


async def test_grpc_refuses_numbers_that_are_out_of_range(call, backend):
    for count in (-1, 21):
        context = await refused(call, "Chat", chat(prompt_logprobs=count))
        assert context.violation.field == "prompt_logprobs"
    assert backend.jobs == []


def test_a_blank_that_a_tokenizer_puts_first_is_not_counted():
    pieces = {1: "", 2: " Hel", 3: "lo", 4: " you"}
    echo = echo_of("Hello you", (1, 2, 3, 4), pieces.__getitem__)
    assert echo.offsets == (0, 0, 3, 5)
