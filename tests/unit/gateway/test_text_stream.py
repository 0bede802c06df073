"""One answer: text, stop strings, reasons and counts, whatever the batches look like."""

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.errors import Cancelled, DeadlineExceeded, Internal, Unavailable
from core.messages import StopReason
from gateway import text_stream
from gateway.backend import TokenBatch
from gateway.inputs import ChatInput, ChatMessage, CompletionInput, SamplingInput
from gateway.ledger import Ledger
from gateway.text_stream import DoneEvent, TextEvent


async def answer(api, *stop, prompt="Once", **sampling):
    request = CompletionInput(
        model="demo-model", prompt=prompt, sampling=SamplingInput(stop=stop, **sampling)
    )
    async with api.complete(request, ledger=Ledger()) as stream:
        events = [event async for event in stream]
    *texts, done = events
    assert all(isinstance(event, TextEvent) for event in texts)
    assert isinstance(done, DoneEvent)
    return texts, done


def joined(texts):
    return "".join(event.text for event in texts)


async def test_text_reason_and_usage(api, backend):
    texts, done = await answer(api)
    assert joined(texts) == "Paris is the capital."
    assert done.stop_reason is StopReason.EOS
    assert done.usage.prompt_tokens == len(backend.jobs[0].prompt_token_ids)
    assert done.usage.cached_tokens == 3
    # The end-of-sequence token counts and is no text.
    count = sum(len(event.token_ids) for event in texts)
    assert done.usage.completion_tokens == count == len(backend.script)


async def test_a_token_that_stops_is_counted_and_silent(api, backend, tokenizer):
    ids = list(tokenizer.encode_plain("one two"))
    backend.say_ids(ids, 1, StopReason.STOP_SEQUENCE)
    texts, done = await answer(api, stop_token_ids=(ids[-1],))
    assert joined(texts) == tokenizer.decode(ids[:-1])
    assert done.usage.completion_tokens == len(ids)
    assert backend.jobs[0].sampling.stop_token_ids == (ids[-1],)


async def test_an_end_inside_a_character_is_told_by_one_mark(api, backend, tokenizer):
    ids = list(tokenizer.encode_plain("ok 🚀"))[:-1]
    backend.say_ids(ids, 2, StopReason.LENGTH)
    texts, done = await answer(api)
    assert joined(texts) == "ok \ufffd"
    assert done.stop_reason is StopReason.LENGTH


@settings(
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(size=st.integers(1, 12), stop=st.sampled_from([(), ("DEFGHIJ",), ("F", "FG"), ("🚀",)]))
def test_neither_text_nor_counts_depend_on_the_batches(api, backend, size, stop):
    async def both():
        backend.say("ABCDEFGHIJ 🚀 KLM 삼겹살", size=1)
        one = await answer(api, *stop)
        backend.say("ABCDEFGHIJ 🚀 KLM 삼겹살", size=size)
        return one, await answer(api, *stop)

    (texts_a, done_a), (texts_b, done_b) = asyncio.run(both())
    assert joined(texts_a) == joined(texts_b)
    assert done_a.usage == done_b.usage
    assert done_a.stop_reason is done_b.stop_reason


@pytest.mark.parametrize(
    "text, stop, expected",
    [
        ("ABCDEFGHIJKLM", ("DEFGHIJ",), "ABC"),
        ("L M N O P Q R", ("ZZ", "O P Q", "```"), "L M N "),
        ("0123", ("12", "123"), "0"),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 100])
async def test_a_stop_string_ends_the_job(api, backend, text, stop, expected, size):
    backend.say(text, size=size)
    texts, done = await answer(api, *stop)
    assert joined(texts) == expected
    assert done.stop_reason is StopReason.STOP_SEQUENCE
    assert backend.stops == [StopReason.STOP_SEQUENCE]
    assert backend.closed.is_set()


async def test_a_stop_string_in_the_prompt_means_nothing(api, backend):
    backend.say("fine")
    texts, done = await answer(api, "\nUser:", prompt="User: hi\nUser: ho\nAssistant:")
    assert joined(texts) == "fine"
    assert done.stop_reason is StopReason.EOS


async def test_what_could_have_become_a_stop_string_is_released_at_the_end(api, backend):
    backend.say("wait for EN")
    texts, done = await answer(api, "END")
    assert joined(texts) == "wait for EN"
    assert done.stop_reason is StopReason.EOS
    assert backend.stops == []


@pytest.mark.parametrize(
    "reason, kind",
    [
        (StopReason.TIMEOUT, DeadlineExceeded),
        (StopReason.CANCELLED, Cancelled),
        (StopReason.ERROR, Internal),
    ],
)
async def test_a_reason_that_is_no_end_is_an_error_after_the_text(api, backend, reason, kind):
    backend.say("so far", reason=reason)
    seen = ""
    request = CompletionInput(model="demo-model", prompt="x")
    with pytest.raises(kind):
        async with api.complete(request, ledger=Ledger()) as stream:
            async for event in stream:
                assert isinstance(event, TextEvent)
                seen += event.text
    assert seen == "so far"
    assert backend.closed.is_set()


async def test_a_stream_that_breaks_off_is_an_internal_error(api, backend):
    backend.script = [TokenBatch(token_ids=(100,))]
    with pytest.raises(Internal, match="broke off"):
        await answer(api)


async def test_a_backend_error_passes_through(api, backend):
    backend.script = [TokenBatch(token_ids=(100,)), Unavailable("the worker was lost")]
    with pytest.raises(Unavailable, match="was lost"):
        await answer(api)


async def test_a_backend_that_forgets_the_deadline_is_not_waited_for(api, backend, monkeypatch):
    monkeypatch.setattr(text_stream, "_OVERTIME_S", 0.0)
    backend.script = [asyncio.Event()]
    request = CompletionInput(model="demo-model", prompt="x")
    with pytest.raises(DeadlineExceeded):
        async with api.complete(request, ledger=Ledger(), remaining_s=0.05) as stream:
            async for _ in stream:
                raise AssertionError("nothing was scripted")
    assert backend.closed.is_set()


async def test_leaving_early_closes_the_job(api, backend):
    request = ChatInput(model="demo-model", messages=(ChatMessage(role="user", content="hi"),))
    async with api.chat(request, ledger=Ledger()) as stream:
        async for event in stream:
            assert isinstance(event, TextEvent)
            break
    assert backend.closed.is_set()


async def test_the_ledger_adds_up(api, backend):
    clock = iter(float(tick) for tick in range(1000))
    request = CompletionInput(model="demo-model", prompt="x")
    ledger = Ledger(0.0, clock=lambda: next(clock))
    async with api.complete(request, ledger=ledger) as stream:
        done = [event async for event in stream][-1]
    timing = done.timing
    assert timing.queue_s == 0.5
    assert (timing.grant_s, timing.prefill_compute_s) == (0.01, 0.02)
    assert timing.validate_s > 0 and timing.tokenise_s > 0 and timing.flush_s > 0
    assert timing.validate_s + timing.tokenise_s + timing.flush_s < timing.ttft_s < timing.total_s


async def test_the_clock_of_the_first_token_stops_when_it_is_taken(api, backend):
    now = [0.0]
    request = CompletionInput(model="demo-model", prompt="x")
    ledger = Ledger(0.0, clock=lambda: now[0])
    async with api.complete(request, ledger=ledger) as stream:
        async for event in stream:
            now[0] += 1.0  # the client takes a second for each event
            last = event
    assert isinstance(last, DoneEvent)
    assert last.timing.ttft_s == last.timing.flush_s == 1.0
    assert last.timing.total_s > 1.0
