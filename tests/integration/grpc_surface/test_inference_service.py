"""The public gRPC server on a real socket over a scripted cluster: every call, every end."""

import asyncio

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from grpc_status import rpc_status

from core import rpc
from core.config import ClusterConfig, GatewayConfig
from core.errors import Overloaded, RateLimited, Unavailable, WorkerLost
from core.messages import StopReason
from gateway import grpc_call
from gateway.api import InferenceApi
from gateway.grpc_server import PublicGrpcServer
from gateway.grpc_service import SERVICE, InferenceService
from protos.tandem.v1 import inference_pb2 as pb

ROUTERS = "vllm.grpc.engine.VllmEngine"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def chat(**sampling):
    return pb.ChatRequest(
        model="demo",
        messages=[pb.ChatMessage(role="user", content="hi")],
        sampling=pb.SamplingOptions(**sampling),
    )


def generate(**sampling):
    return pb.GenerateRequest(model="demo", text="x", sampling=pb.SamplingOptions(**sampling))


async def events(call):
    return [event async for event in call]


async def within(awaitable, seconds=10):
    return await asyncio.wait_for(awaitable, seconds)


def details_of(error):
    """The details of a status by their name."""
    found = {}
    for packed in rpc_status.from_call(error).details:
        detail = getattr(error_details_pb2, packed.TypeName().rsplit(".", 1)[1])()
        assert packed.Unpack(detail)
        found[type(detail).__name__] = detail
    return found


async def refused(call, code):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (call if not hasattr(call, "read") else events(call))
    assert caught.value.code() is code, caught.value
    found = details_of(caught.value)
    assert found["ErrorInfo"].domain == "tandem"
    assert found["RequestInfo"].request_id
    return found


async def test_text_or_token_ids_go_in_and_both_come_out(start, backend, tokenizer, text):
    by_ids = pb.GenerateRequest(model="demo", token_ids=pb.TokenIds(ids=[5, 6]))
    async with start() as (_, _, stub):
        for method, request in (("Chat", chat()), ("Generate", generate()), ("Generate", by_ids)):
            *deltas, last = await events(getattr(stub, method)(request, timeout=10))
            assert "".join(event.delta.text for event in deltas) == text
            ids = [token_id for event in deltas for token_id in event.delta.token_ids]
            assert ids == [*tokenizer.encode_plain(text), 2]
            assert last.finished.stop_reason == pb.STOP_REASON_EOS
    assert backend.jobs[2].prompt_token_ids == (5, 6)


async def test_zero_is_a_value_and_absence_is_the_default_on_the_wire(start, backend):
    async with start() as (_, _, stub):
        await events(stub.Chat(chat(), timeout=10))
        await events(stub.Chat(chat(temperature=0, seed=0, top_k=0), timeout=10))
        await refused(stub.Chat(chat(max_tokens=0)), grpc.StatusCode.INVALID_ARGUMENT)
    absent, zero = (job.sampling for job in backend.jobs)
    assert (absent.temperature, zero.temperature) == (1.0, 0.0)
    assert zero.seed == 0 != absent.seed


async def test_tokens_and_text_convert_both_ways(start, tokenizer):
    async with start() as (_, _, stub):
        asked = pb.TokenizeRequest(model="demo", text="Grüße <|im_end|>")
        answer = await stub.Tokenize(asked, timeout=10)
        assert tuple(answer.token_ids) == tokenizer.encode_prompt("Grüße <|im_end|>")
        assert answer.context_window == 8192
        back = pb.DetokenizeRequest(model="demo", token_ids=answer.token_ids)
        assert (await stub.Detokenize(back, timeout=10)).text == "Grüße <|im_end|>"


async def test_a_conversation_is_tokenised_as_chat_reads_it(start, backend):
    async with start() as (_, _, stub):
        await events(stub.Chat(chat(), timeout=10))
        conversation = pb.Conversation(messages=chat().messages)
        asked = pb.TokenizeRequest(model="demo", conversation=conversation)
        answer = await stub.Tokenize(asked, timeout=10)
        assert tuple(answer.token_ids) == backend.jobs[0].prompt_token_ids


@pytest.mark.parametrize(
    "request_, field",
    [
        (pb.TokenizeRequest(model="demo"), "input"),
        (pb.TokenizeRequest(model="demo", text=""), "prompt"),
        (pb.TokenizeRequest(model="demo", conversation=pb.Conversation()), "messages"),
        (pb.DetokenizeRequest(model="demo", token_ids=[-1]), "token_ids[0]"),
        (pb.DetokenizeRequest(model="demo", token_ids=[0, 49152]), "token_ids[1]"),
        (pb.DetokenizeRequest(model="demo", token_ids=[1] * 8193), "token_ids"),
        (pb.GetModelRequest(), "model"),
    ],
)
async def test_what_cannot_be_converted_names_its_field(start, request_, field):
    async with start() as (_, _, stub):
        name = type(request_).__name__.removesuffix("Request")
        found = await refused(
            getattr(stub, name)(request_, timeout=10), grpc.StatusCode.INVALID_ARGUMENT
        )
        (violation,) = found["BadRequest"].field_violations
        assert violation.field == field


async def test_models_are_listed_and_described(start):
    async with start() as (_, _, stub):
        (listed,) = (await stub.ListModels(pb.ListModelsRequest(), timeout=10)).models
        got = await stub.GetModel(pb.GetModelRequest(model="demo"), timeout=10)
        assert got.model == listed
        assert (listed.id, listed.context_window) == ("demo", 8192)
        unknown = stub.GetModel(pb.GetModelRequest(model="nope"), timeout=10)
        found = await refused(unknown, grpc.StatusCode.NOT_FOUND)
        assert found["ErrorInfo"].reason == "MODEL_NOT_FOUND"


@pytest.mark.parametrize("label", [None, "mine"])
async def test_a_running_request_is_cancelled_by_its_id(start, backend, label):
    backend.hold.clear()
    async with start() as (_, _, stub):
        metadata = (("x-request-id", label),) if label else None
        call = stub.Chat(chat(), timeout=30, metadata=metadata)
        request_id = dict(await call.initial_metadata())["x-request-id"]
        assert label in (None, request_id)
        assert request_id
        first = await call.read()
        await stub.Cancel(pb.CancelRequest(request_id=request_id), timeout=10)
        await within(backend.closed.wait())
        rest = [first]
        while (event := await call.read()) is not grpc.aio.EOF:
            rest.append(event)
        assert await call.code() is grpc.StatusCode.OK
        finished = rest[-1].finished
        assert finished.stop_reason == pb.STOP_REASON_CANCELLED
        streamed = sum(len(event.delta.token_ids) for event in rest)
        assert finished.usage.completion_tokens == streamed > 0
        assert backend.stops == [StopReason.CANCELLED]
        again = stub.Cancel(pb.CancelRequest(request_id=request_id), timeout=10)
        found = await refused(again, grpc.StatusCode.NOT_FOUND)
        assert found["ErrorInfo"].reason == "REQUEST_NOT_FOUND"


async def test_a_request_that_waits_in_the_queue_is_cancelled_too(start, backend):
    backend.queue.clear()
    async with start() as (_, _, stub):
        call = stub.Generate(generate(), timeout=30, metadata=(("x-request-id", "q"),))
        reading = asyncio.create_task(events(call))
        await within(backend.opened.wait())
        await stub.Cancel(pb.CancelRequest(request_id="q"), timeout=10)
        (only,) = await within(reading)
        assert only.finished.stop_reason == pb.STOP_REASON_CANCELLED
        assert backend.closed.is_set()


async def test_a_client_that_leaves_ends_the_job(start, backend):
    backend.hold.clear()
    async with start() as (_, _, stub):
        call = stub.Generate(generate(), timeout=30)
        await call.read()
        call.cancel()
        await within(backend.closed.wait())


async def test_a_deadline_that_is_too_short_ends_the_job(start, backend):
    backend.hold.clear()
    async with start() as (_, _, stub):
        call = stub.Generate(generate(), timeout=0.3)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await events(call)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await within(backend.closed.wait())
        assert 0 < backend.jobs[0].remaining_s <= 0.3


async def test_bad_values_name_their_field(start):
    async with start() as (_, _, stub):
        found = await refused(stub.Chat(chat(temperature=9)), grpc.StatusCode.INVALID_ARGUMENT)
        (violation,) = found["BadRequest"].field_violations
        assert (violation.field, violation.reason) == ("temperature", "INVALID_REQUEST")
        assert found["ErrorInfo"].metadata["field"] == "temperature"
        assert found["ErrorInfo"].metadata["http_status"] == "400"


@pytest.mark.parametrize(
    "error, code, kinds",
    [
        (Overloaded("full", retry_after_s=1.5), "RESOURCE_EXHAUSTED", {"RetryInfo"}),
        (
            RateLimited("used up", quota="tenant acme", resource="tokens", retry_after_s=1.5),
            "RESOURCE_EXHAUSTED",
            {"RetryInfo", "QuotaFailure"},
        ),
        (
            RateLimited("never fits", quota="key k", retry_after_s=None),
            "RESOURCE_EXHAUSTED",
            {"QuotaFailure"},
        ),
        (Unavailable("nobody there"), "UNAVAILABLE", set()),
        (WorkerLost("lost"), "UNAVAILABLE", set()),
        (KeyError("CANARY"), "INTERNAL", set()),
    ],
)
async def test_each_refusal_has_its_details(start, backend, error, code, kinds):
    backend.refusal = error
    async with start() as (_, _, stub):
        call = stub.Chat(chat(), timeout=10, metadata=(("x-request-id", "abc"),))
        found = await refused(call, grpc.StatusCode[code])
        assert set(found) == {"ErrorInfo", "RequestInfo"} | kinds
        assert found["RequestInfo"].request_id == "abc"
        if "RetryInfo" in kinds:
            assert found["RetryInfo"].retry_delay.ToTimedelta().total_seconds() == 1.5
            assert found["ErrorInfo"].metadata["retry_after_s"] == "1.500"
        if "QuotaFailure" in kinds:
            (violation,) = found["QuotaFailure"].violations
            assert violation.subject == error.quota
            assert violation.quota_metric == error.resource
        assert "CANARY" not in str(found)


async def test_a_message_above_the_limit_is_refused_with_the_limit(start, backend):
    async with start(max_body_bytes=2000) as (_, _, stub):
        large = pb.GenerateRequest(model="demo", text="x" * 2500)
        found = await refused(stub.Generate(large), grpc.StatusCode.INVALID_ARGUMENT)
        assert found["ErrorInfo"].reason == "REQUEST_TOO_LARGE"
        (violation,) = found["BadRequest"].field_violations
        assert "at most 2000" in violation.description
    assert backend.jobs == []


async def test_a_method_that_does_not_exist_is_refused_with_details(start):
    async with start() as (_, channel, _):
        call = channel.unary_unary(f"/{SERVICE}/Dance")
        found = await refused(call(b"", timeout=10), grpc.StatusCode.UNIMPLEMENTED)
        assert found["ErrorInfo"].reason == "UNSUPPORTED"


async def test_a_client_that_does_not_read_is_given_up_and_hurts_nobody(
    start, backend, monkeypatch
):
    monkeypatch.setattr(grpc_call, "WRITE_TIMEOUT_S", 0.5)
    backend.flood = 2000
    async with start() as (_, _, stub):
        slow = stub.Generate(generate(), timeout=60)
        await slow.read()
        await within(backend.closed.wait(), 30)  # without a further read by the client
        backend.flood = 0
        *_, last = await events(stub.Generate(generate(), timeout=10))
        assert last.finished.stop_reason == pb.STOP_REASON_EOS
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while True:
                await slow.read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert details_of(caught.value)["ErrorInfo"].reason == "SLOW_READER"


async def test_a_slow_reader_is_cancelled_like_any_other(start, backend):
    backend.flood = 2000
    async with start() as (_, _, stub):
        slow = stub.Generate(generate(), timeout=60, metadata=(("x-request-id", "slow"),))
        await slow.read()
        await stub.Cancel(pb.CancelRequest(request_id="slow"), timeout=10)
        assert backend.stops == [StopReason.CANCELLED]


async def test_health_is_told_for_the_whole_and_for_each_service(start):
    async with start() as (server, channel, _):
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", SERVICE, ROUTERS):
            watch = health.Watch(health_pb2.HealthCheckRequest(service=service))
            assert (await watch.read()).status == SERVING
            await server.set_serving(False)
            assert (await within(watch.read())).status == NOT_SERVING
            await server.set_serving(True)
            assert (await within(watch.read())).status == SERVING
            watch.cancel()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health.Check(health_pb2.HealthCheckRequest(service="other"), timeout=10)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_server_is_not_serving_before_it_is_told_so(card, tokenizer, backend):
    config = GatewayConfig(grpc_port=0)
    api = InferenceApi.of_one(card, "demo", ClusterConfig(), backend, tokenizer=tokenizer)
    server = PublicGrpcServer([InferenceService(api)], config)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            health = health_pb2_grpc.HealthStub(channel)
            asked = health_pb2.HealthCheckRequest(service=SERVICE)
            assert (await health.Check(asked, timeout=10)).status == NOT_SERVING
    finally:
        await server.stop(0)
        api.close()


@pytest.mark.parametrize("channelz", [True, False])
async def test_reflection_lists_what_is_served(start, channelz):
    async with start(channelz=channelz) as (server, _, _):

        def reflected():
            with grpc.insecure_channel(f"127.0.0.1:{server.port}") as plain:
                database = ProtoReflectionDescriptorDatabase(plain)
                file = database.FindFileContainingSymbol(SERVICE)
                assert database.FindFileContainingSymbol(ROUTERS).package == "vllm.grpc.engine"
                return set(database.get_services()), file

        names, file = await asyncio.to_thread(reflected)
        assert {SERVICE, ROUTERS, "grpc.health.v1.Health"} <= names
        assert ("grpc.channelz.v1.Channelz" in names) is channelz
        assert [service.name for service in file.service] == ["InferenceService"]


async def test_channelz_shows_the_servers_calls(start):
    async with start(channelz=True) as (_, channel, stub):
        await events(stub.Chat(chat(), timeout=10))
        view = channelz_pb2_grpc.ChannelzStub(channel)
        servers = (await view.GetServers(channelz_pb2.GetServersRequest(), timeout=10)).server
        assert max(server.data.calls_started for server in servers) >= 1


async def test_an_old_connection_moves_its_client_and_keeps_its_streams(start, backend):
    backend.hold.clear()
    async with start(max_connection_age_s=0.5, max_connection_age_grace_s=30) as (_, channel, stub):
        call = stub.Generate(generate(), timeout=30)
        await call.read()
        state = channel.get_state()
        while state is grpc.ChannelConnectivity.READY:
            await within(channel.wait_for_state_change(state))
            state = channel.get_state()
        # The connection takes nothing new, so this call makes another one.
        assert (await stub.ListModels(pb.ListModelsRequest(), timeout=10)).models
        backend.hold.set()
        *_, last = [event async for event in _rest(call)]
        assert last.finished.stop_reason == pb.STOP_REASON_EOS


async def _rest(call):
    while (event := await call.read()) is not grpc.aio.EOF:
        yield event


async def test_one_connection_has_as_many_calls_at_once_as_the_server_says(start, backend):
    backend.queue.clear()
    async with start(max_concurrent_streams=1) as (_, _, stub):
        first = asyncio.create_task(events(stub.Generate(generate(), timeout=30)))
        await within(backend.opened.wait())
        second = asyncio.create_task(events(stub.Generate(generate(), timeout=30)))
        backend.queue.set()
        await within(asyncio.gather(first, second))
    assert len(backend.jobs) == 2


def test_what_our_clients_ping_every_server_allows():
    ours = dict(rpc.CLIENT_OPTIONS)
    public, inside = dict(rpc.PUBLIC_SERVER_OPTIONS), dict(rpc.OPTIONS)
    allowed = "grpc.http2.min_ping_interval_without_data_ms"
    assert ours["grpc.keepalive_time_ms"] > 2 * public[allowed]
    assert inside["grpc.keepalive_time_ms"] >= 2 * inside[allowed]
    for options in (public, inside):
        assert options["grpc.keepalive_permit_without_calls"] == 1
