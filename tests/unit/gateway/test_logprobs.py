"""Log probabilities in the shapes that clients of each API take apart."""

from dataclasses import replace

import pytest

from core.messages import StopReason, TokenLogprobs
from gateway.grpc_codec import completion_input
from protos.tandem.v1 import inference_pb2 as pb


@pytest.fixture
def told(backend, tokenizer):
    """ "Hé 🚀" token by token, each with itself and one other as the likeliest."""
    ids = list(tokenizer.encode_plain("Hé 🚀"))
    backend.say_ids([*ids, backend.eos], 1, StopReason.EOS)
    other = tokenizer.encode_plain("x")[0]
    backend.script = [
        replace(
            step,
            logprobs=(
                TokenLogprobs(
                    logprob=-0.5 - i,
                    top_token_ids=(step.token_ids[0], other),
                    top_logprobs=(-0.5 - i, -7.0),
                ),
            ),
        )
        for i, step in enumerate(backend.script)
    ]
    return ids


@pytest.mark.parametrize("stream", [False, True])
async def test_the_chat_shape_has_text_bytes_and_likeliest(http, backend, told, tokenizer, stream):
    reply = await http.chat(logprobs=True, top_logprobs=2, stream=stream)
    assert backend.jobs[0].sampling.logprobs and backend.jobs[0].sampling.top_logprobs == 2
    if stream:
        found = [chunk["choices"][0]["logprobs"] for chunk in reply.chunks]
        content = [entry for each in found if each for entry in each["content"]]
    else:
        content = reply.json()["choices"][0]["logprobs"]["content"]
    assert len(content) == len(told) + 1  # the end of sequence is one of the tokens
    assert [entry["logprob"] for entry in content] == [-0.5 - i for i in range(len(content))]
    raw = b"".join(bytes(entry["bytes"]) for entry in content[:-1])
    assert raw.decode() == "Hé 🚀"
    last = content[-1]
    assert (last["token"], last["bytes"]) == (tokenizer.name(backend.eos), None)
    for entry in content:
        assert [each["logprob"] for each in entry["top_logprobs"]] == [entry["logprob"], -7.0]
        assert entry["top_logprobs"][0]["token"] == entry["token"]
        assert entry["top_logprobs"][1] == {"token": "x", "logprob": -7.0, "bytes": [0x78]}


@pytest.mark.parametrize("stream", [False, True])
async def test_the_completion_shape_is_four_lists(http, backend, told, stream):
    reply = await http.complete(logprobs=2, stream=stream)
    if stream:
        parts = [chunk["choices"][0]["logprobs"] for chunk in reply.chunks]
        found = {
            name: [entry for part in parts if part for entry in part[name]]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
    else:
        found = reply.json()["choices"][0]["logprobs"]
    count = len(told) + 1
    assert {name: len(values) for name, values in found.items()} == dict.fromkeys(found, count)
    assert found["token_logprobs"] == [-0.5 - i for i in range(count)]
    assert found["text_offset"] == sorted(found["text_offset"])
    assert (found["text_offset"][0], found["text_offset"][-1]) == (0, len("Hé 🚀"))
    # The rocket takes several tokens, none of them a text: each has a name of its own.
    broken = [name for name in found["tokens"] if name.startswith("bytes:\\x")]
    assert len(broken) == len(set(broken)) >= 2
    for name, logprob, top in zip(
        found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True
    ):
        assert top == {name: logprob, "x": -7.0}


async def test_a_token_alone_is_told_where_no_likeliest_are_asked_for(http, backend, told):
    await http.chat(logprobs=True)
    await http.complete(logprobs=0)
    assert [(job.sampling.logprobs, job.sampling.top_logprobs) for job in backend.jobs] == [
        (True, 0),
        (True, 0),
    ]


async def test_tokens_behind_a_stop_string_have_no_log_probabilities(http, told):
    choice = (await http.chat(logprobs=True, stop=["é"])).json()["choices"][0]
    text = "".join(entry["token"] for entry in choice["logprobs"]["content"])
    assert text.startswith("H") and "🚀" not in text
    assert choice["message"]["content"] == "H"


async def test_nothing_is_told_unasked(http, backend):
    assert (await http.chat()).json()["choices"][0]["logprobs"] is None
    assert (await http.chat(logprobs=False)).json()["choices"][0]["logprobs"] is None
    assert not any(job.sampling.logprobs for job in backend.jobs)


@pytest.mark.parametrize(
    "route, fields, field",
    [
        ("chat", {"top_logprobs": 2}, "top_logprobs"),
        ("chat", {"logprobs": False, "top_logprobs": 1}, "top_logprobs"),
        ("chat", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("chat", {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ("chat", {"logprobs": 1}, "logprobs"),
        ("complete", {"logprobs": 21}, "logprobs"),
        ("complete", {"logprobs": -1}, "logprobs"),
        ("complete", {"logprobs": True}, "logprobs"),
    ],
)
async def test_what_cannot_be_told_is_refused_by_name(http, backend, route, fields, field):
    error = (await getattr(http, route)(**fields)).error
    assert (error["param"], error["code"]) == (field, "invalid_request")
    assert backend.jobs == []


def test_grpc_tells_zero_from_none():
    def asked(**options):
        request = pb.GenerateRequest(text="x", sampling=pb.SamplingOptions(**options))
        return completion_input(request).sampling

    assert asked().logprobs is None
    assert asked(logprobs=0).logprobs == 0
    assert asked(n=3, min_tokens=2).n == 3
    assert dict(asked(logit_bias={5: 1.5, 7: -2}).logit_bias) == {5: 1.5, 7: -2.0}
