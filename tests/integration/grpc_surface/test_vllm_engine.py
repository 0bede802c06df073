"""vllm.grpc.engine.VllmEngine as a router calls it: token ids in, token ids out."""

import asyncio
import hashlib
import io
import json
import zipfile

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2
from tokenizers import Tokenizer

from core.messages import GrammarKind, StopReason

SERVICE = "vllm.grpc.engine.VllmEngine"


@pytest.fixture
async def engine(start):
    async with start() as (_, channel, _):
        yield vllm_engine_pb2_grpc.VllmEngineStub(channel)


def asked(*, stream, request_id="r", input_ids=(5, 6), **sampling):
    return pb.GenerateRequest(
        request_id=request_id,
        tokenized=pb.TokenizedInput(input_ids=input_ids),
        sampling_params=pb.SamplingParams(**sampling),
        stream=stream,
    )


async def answers(call):
    return [response async for response in call]


async def test_tokens_are_streamed_and_then_told_whole(engine, backend, tokenizer, text):
    *chunks, last = await answers(engine.Generate(asked(stream=True), timeout=10))
    expected = [*tokenizer.encode_plain(text), 2]
    assert [token_id for each in chunks for token_id in each.chunk.token_ids] == expected
    assert sum(each.chunk.completion_tokens for each in chunks) == len(expected)
    assert list(last.complete.output_ids) == expected
    assert last.complete.finish_reason == "stop"
    assert (last.complete.prompt_tokens, last.complete.completion_tokens) == (2, len(expected))
    assert backend.jobs[0].prompt_token_ids == (5, 6)


async def test_without_stream_the_answer_comes_in_one_piece(engine, tokenizer, text):
    (only,) = await answers(engine.Generate(asked(stream=False), timeout=10))
    assert list(only.complete.output_ids) == [*tokenizer.encode_plain(text), 2]


async def test_a_text_is_tokenised_here(engine, backend, tokenizer):
    await answers(engine.Generate(pb.GenerateRequest(text="a b"), timeout=10))
    assert backend.jobs[0].prompt_token_ids == tokenizer.encode_prompt("a b")


async def test_the_protocols_zeros_are_not_values_but_temperature_is(engine, backend):
    await answers(engine.Generate(asked(stream=True), timeout=10))
    set_ = asked(
        stream=True, temperature=0, top_p=0.5, top_k=7, max_tokens=9, seed=0, n=1, ignore_eos=True
    )
    await answers(engine.Generate(set_, timeout=10))
    bare, full = (job.sampling for job in backend.jobs)
    assert (bare.temperature, bare.top_p, bare.repetition_penalty) == (1.0, 1.0, 1.0)
    assert (full.temperature, full.top_p, full.top_k, full.seed) == (0.0, 0.5, 7, 0)
    assert (full.max_new_tokens, full.ignore_eos) == (9, True)


@pytest.mark.parametrize("stream", [True, False])
async def test_each_answer_has_its_chunks_and_an_end_of_its_own(engine, tokenizer, text, stream):
    responses = await answers(engine.Generate(asked(stream=stream, n=3), timeout=10))
    expected = [*tokenizer.encode_plain(text), 2]
    whole = [each.complete for each in responses if each.HasField("complete")]
    assert sorted(each.index for each in whole) == [0, 1, 2]
    for each in whole:
        assert list(each.output_ids) == expected
        assert (each.finish_reason, each.completion_tokens) == ("stop", len(expected))
        chunks = [r.chunk for r in responses if r.HasField("chunk") and r.chunk.index == each.index]
        told = [token_id for chunk in chunks for token_id in chunk.token_ids]
        assert told == (expected if stream else [])


async def test_log_probabilities_of_prompt_and_answer_are_told(engine, backend, tokenizer, text):
    wanted = asked(stream=True, input_ids=(5, 6, 7), n=2, logprobs=2, prompt_logprobs=2)
    responses = await answers(engine.Generate(wanted, timeout=10))
    sampling = backend.jobs[0].sampling
    assert (sampling.top_logprobs, sampling.top_prompt_logprobs) == (2, 2)
    expected = [*tokenizer.encode_plain(text), 2]
    for index in range(2):
        mine = [r.chunk for r in responses if r.HasField("chunk") and r.chunk.index == index]
        (whole,) = (
            r.complete for r in responses if r.complete.index == index and not r.chunk.token_ids
        )
        told = [value for each in mine for value in each.output_logprobs.token_logprobs]
        assert told == [-i / 2 for i in expected] == list(whole.output_logprobs.token_logprobs)
        assert list(whole.output_logprobs.token_ids) == expected
        assert list(whole.output_logprobs.top_logprobs[0].token_ids) == [expected[0], 1]
        assert not any(each.HasField("input_logprobs") for each in mine[1:])
        for prompt in (mine[0].input_logprobs, whole.input_logprobs):
            assert list(prompt.token_ids) == [5, 6, 7]
            assert not prompt.token_logprobs[0].HasField("value")
            assert [each.value for each in prompt.token_logprobs[1:]] == [-3.0, -3.5]
            assert [list(each.token_ids) for each in prompt.top_logprobs] == [[], [6, 1], [7, 1]]


async def test_constraints_and_biases_reach_the_workers(engine, backend):
    for constraint, kind in (
        ({"json_schema": '{"type": "integer"}'}, GrammarKind.JSON_SCHEMA),
        ({"json_object": True}, GrammarKind.JSON_SCHEMA),
        ({"regex": "a+"}, GrammarKind.REGEX),
        ({"grammar": 'root ::= "a"'}, GrammarKind.LARK),
        ({"choice": pb.ChoiceConstraint(choices=["a", "b"])}, GrammarKind.LARK),
    ):
        await answers(engine.Generate(asked(stream=True, **constraint), timeout=10))
        assert backend.jobs[-1].sampling.grammar.kind is kind
    await answers(engine.Generate(asked(stream=True, json_object=False), timeout=10))
    assert backend.jobs[-1].sampling.grammar is None
    biased = asked(stream=True, logit_bias={7: 1.5}, min_tokens=2)
    await answers(engine.Generate(biased, timeout=10))
    sampling = backend.jobs[-1].sampling
    assert sampling.min_tokens == 2
    assert [(each.token_id, each.bias) for each in sampling.logit_bias] == [(7, 1.5)]


async def test_a_stop_string_is_matched_and_named(engine, backend):
    stopping = asked(stream=False, stop=["capital"])
    (only,) = await answers(engine.Generate(stopping, timeout=10))
    assert only.complete.finish_reason == "stop"
    assert only.complete.matched_stop_str == "capital"
    assert StopReason.STOP_SEQUENCE in backend.stops


@pytest.mark.parametrize(
    "request_, field",
    [
        (asked(stream=True, n=17), "n"),
        (asked(stream=True, n=2**32 - 1), "n"),
        (asked(stream=True, logprobs=-1), "logprobs"),
        (asked(stream=True, prompt_logprobs=21), "prompt_logprobs"),
        (asked(stream=True, max_tokens=3, min_tokens=4), "min_tokens"),
        (asked(stream=True, json_schema="{"), "sampling_params.json_schema"),
        (asked(stream=True, json_schema='{"not": {}}'), "sampling_params.json_schema"),
        (asked(stream=True, regex="("), "sampling_params.regex"),
        (asked(stream=True, choice=pb.ChoiceConstraint()), "sampling_params.choice"),
        (asked(stream=True, grammar="("), "sampling_params.grammar"),
        (asked(stream=True, structural_tag="x"), "sampling_params.structural_tag"),
        (asked(stream=True, json_object=True, ignore_eos=True), "ignore_eos"),
        (asked(stream=True, truncate_prompt_tokens=4), "sampling_params.truncate_prompt_tokens"),
        (asked(stream=True, logit_bias={-1: 1.0}), "logit_bias.-1"),
        (pb.GenerateRequest(text="x", kv_transfer_params_json="{}"), "kv_transfer_params_json"),
        (pb.GenerateRequest(text="x", data_parallel_rank=0), "data_parallel_rank"),
        (pb.GenerateRequest(text="x", mm_inputs=pb.MultimodalInputs()), "mm_inputs"),
        (pb.GenerateRequest(), "input"),
        (asked(stream=True, temperature=9), "temperature"),
        (asked(stream=True, input_ids=(49152,)), "prompt[0]"),
        (asked(stream=True, request_id="x" * 200), "request_id"),
    ],
)
async def test_what_is_not_served_is_refused_by_name(engine, backend, request_, field):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answers(engine.Generate(request_, timeout=10))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details().startswith(f"{field}: ")
    assert backend.jobs == []


async def test_a_request_is_aborted_by_the_routers_id(engine, backend):
    backend.hold.clear()
    call = engine.Generate(asked(stream=True, request_id="cmpl-7"), timeout=30)
    await call.read()
    await engine.Abort(pb.AbortRequest(request_ids=["unknown", "cmpl-7"]), timeout=10)
    last = None
    while (response := await call.read()) is not grpc.aio.EOF:
        last = response
    assert last.complete.finish_reason == "abort"
    assert last.complete.completion_tokens == len(last.complete.output_ids)
    await asyncio.wait_for(backend.closed.wait(), 30)


async def test_health_follows_readiness(engine, readiness):
    assert (await engine.HealthCheck(pb.HealthCheckRequest(), timeout=10)).healthy
    readiness.say("no workers")
    told = await engine.HealthCheck(pb.HealthCheckRequest(), timeout=10)
    assert (told.healthy, told.message) == (False, "no workers")


async def test_the_router_learns_what_it_must_know(engine, card):
    model = await engine.GetModelInfo(pb.GetModelInfoRequest(), timeout=10)
    assert (model.served_model_name, model.is_generation) == ("demo", True)
    assert (model.max_context_length, model.vocab_size) == (8192, 49152)
    assert tuple(model.eos_token_ids) == card.eos_token_ids
    server = await engine.GetServerInfo(pb.GetServerInfoRequest(), timeout=10)
    assert (server.max_num_seqs, server.data_parallel_size, server.active_requests) == (64, 1, 0)


async def test_loads_count_what_waits_and_what_runs(engine, backend):
    async def load():
        (only,) = (await engine.GetLoads(pb.GetLoadsRequest(), timeout=10)).loads
        return only.num_running_reqs, only.num_waiting_reqs, only.num_waiting_uncached_tokens

    assert await load() == (0, 0, 0)
    backend.queue.clear()
    backend.hold.clear()
    call = engine.Generate(asked(stream=True), timeout=30)
    reading = asyncio.create_task(call.read())
    await asyncio.wait_for(backend.opened.wait(), 30)
    assert await load() == (0, 1, 2)
    backend.queue.set()
    await asyncio.wait_for(reading, 30)
    assert await load() == (1, 0, 0)
    call.cancel()


async def test_the_tokenizer_comes_as_an_archive_with_its_digest(engine, card, text):
    asking = engine.GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=30)
    *first, last = await answers(asking)
    archive = b"".join(piece.data for piece in [*first, last])
    assert hashlib.sha256(archive).hexdigest() == last.sha256
    assert {piece.sha256 for piece in first} == {""}
    with zipfile.ZipFile(io.BytesIO(archive)) as folder:
        config = json.loads(folder.read("tokenizer_config.json"))
        tokenizer = Tokenizer.from_str(folder.read("tokenizer.json").decode())
    assert config["chat_template"] == card.chat_template
    assert config["eos_token"] == card.eos_token
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


async def test_the_calls_of_other_engines_are_unimplemented(engine):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await engine.Embed(pb.EmbedRequest(), timeout=10)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
