"""Several answers to one prompt: whole and streamed, each with its index and its own end."""

import pytest

from core.messages import StopReason
from gateway.backend import TokenBatch


def by_index(chunks):
    found = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            found.setdefault(choice["index"], []).append(choice)
    return found


async def test_whole_answers_are_told_by_index_with_one_usage(http, backend):
    reply = (await http.chat(n=3)).json()
    assert backend.jobs[0].num_choices == 3
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in reply["choices"]} == {
        "Paris is the capital."
    }
    assert {choice["finish_reason"] for choice in reply["choices"]} == {"stop"}
    usage = reply["usage"]
    assert usage["completion_tokens"] == 3 * len(backend.script)
    assert usage["prompt_tokens"] == len(backend.jobs[0].prompt_token_ids)


async def test_streamed_answers_come_side_by_side_and_end_each_by_itself(http, backend):
    backend.say("so far so good", reason=StopReason.LENGTH)
    chunks = (await http.chat(n=2, stream=True, stream_options={"include_usage": True})).chunks
    *chunks, last = chunks
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 2 * len(backend.script)
    found = by_index(chunks)
    assert set(found) == {0, 1}
    for choices in found.values():
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        assert text == "so far so good"
        assert [choice["finish_reason"] for choice in choices][-1] == "length"
        assert [choice["finish_reason"] for choice in choices].count(None) == len(choices) - 1


async def test_completions_have_several_answers_too(http, backend):
    reply = (await http.complete(n=2, best_of=2)).json()
    assert [choice["text"] for choice in reply["choices"]] == ["Paris is the capital."] * 2
    found = by_index((await http.complete(n=2, stream=True)).chunks)
    for choices in found.values():
        assert "".join(choice["text"] for choice in choices) == "Paris is the capital."
        assert choices[-1]["finish_reason"] == "stop"


async def test_a_stop_string_ends_its_choice_alone_and_the_last_one_the_job(http, backend):
    reply = (await http.chat(n=2, stop=["capital"])).json()
    assert [choice["message"]["content"] for choice in reply["choices"]] == ["Paris is the "] * 2
    assert backend.stopped_choices == [0, None]


async def test_batches_of_a_choice_that_was_stopped_count_for_nothing(http, backend, tokenizer):
    ids = tuple(tokenizer.encode_plain("stop here. And more"))
    late = TokenBatch(token_ids=ids, choice=1)
    backend.script = [late, late, TokenBatch(token_ids=(5,), stop_reason=StopReason.LENGTH)]
    reply = (await http.complete(n=2, stop=["here"])).json()
    assert reply["choices"][1]["text"] == "stop "
    assert reply["choices"][1]["finish_reason"] == "stop"
    assert reply["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("n", [0, -1, 17, 2**40])
async def test_a_number_of_answers_out_of_bounds_is_refused(http, n):
    error = (await http.chat(n=n)).error
    assert (error["param"], error["code"]) == ("n", "invalid_request")
    assert "at least 1" in error["message"] or "at most 16" in error["message"]


@pytest.mark.parametrize("fields", [{"best_of": 2}, {"best_of": 1, "n": 2}])
async def test_more_candidates_than_answers_are_refused(http, fields):
    error = (await http.complete(**fields)).error
    assert (error["param"], error["code"]) == ("best_of", "unsupported")


async def test_echo_puts_the_prompt_before_each_answer(http, tokenizer):
    reply = (await http.complete("The capital", n=2, echo=True)).json()
    assert [each["text"] for each in reply["choices"]] == ["The capitalParis is the capital."] * 2
    ids = list(tokenizer.encode_plain("The capital"))
    assert (
        (await http.complete(ids, echo=True))
        .json()["choices"][0]["text"]
        .startswith("The capitalParis")
    )
    found = by_index((await http.complete("The capital", n=2, echo=True, stream=True)).chunks)
    for choices in found.values():
        assert choices[0]["text"] == "The capital"
        assert "".join(each["text"] for each in choices) == "The capitalParis is the capital."
