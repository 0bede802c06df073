"""gRPC over a real cluster: what ends a request frees its blocks, and health tells the truth."""

import os
import signal
import threading

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from core.config import DEFAULT_MODEL
from protos.tandem.v1 import inference_pb2 as pb
from protos.tandem.v1 import inference_pb2_grpc

SERVICE = "tandem.v1.InferenceService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
LONG = pb.GenerateRequest(
    model=DEFAULT_MODEL,
    text="Once upon a time",
    sampling=pb.SamplingOptions(temperature=0, max_tokens=4000, ignore_eos=True),
)


@pytest.fixture
def stub(cluster):
    with grpc.insecure_channel(cluster.grpc_target) as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)


def test_cancel_ends_the_answer_and_frees_its_blocks(cluster, stub, eventually):
    call = stub.Generate(LONG, timeout=120, metadata=(("x-request-id", "to-be-cancelled"),))
    events = [next(call)]
    stub.Cancel(pb.CancelRequest(request_id="to-be-cancelled"), timeout=10)
    events += call
    finished = events[-1].finished
    assert finished.stop_reason == pb.STOP_REASON_CANCELLED
    assert 0 < finished.usage.completion_tokens < 4000
    assert call.code() is grpc.StatusCode.OK
    eventually(cluster.is_at_rest, "every block is free", timeout_s=30)


def test_a_deadline_that_is_too_short_frees_its_blocks(cluster, stub, eventually):
    call = stub.Generate(LONG, timeout=1.5)
    with pytest.raises(grpc.RpcError):
        list(call)
    assert call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    eventually(cluster.is_at_rest, "every block is free", timeout_s=30)


def test_tokens_are_those_that_the_engine_reads(stub):
    asked = pb.TokenizeRequest(model=DEFAULT_MODEL, text="Once upon a time")
    ids = stub.Tokenize(asked, timeout=10).token_ids
    greedy = pb.SamplingOptions(temperature=0, max_tokens=8)
    by_text, by_ids = (
        list(stub.Generate(request, timeout=60))
        for request in (
            pb.GenerateRequest(model=DEFAULT_MODEL, text="Once upon a time", sampling=greedy),
            pb.GenerateRequest(
                model=DEFAULT_MODEL, token_ids=pb.TokenIds(ids=ids), sampling=greedy
            ),
        )
    )
    tokens = [token_id for event in by_ids for token_id in event.delta.token_ids]
    assert tokens == [token_id for event in by_text for token_id in event.delta.token_ids]
    assert by_ids[-1].finished.usage.prompt_tokens == len(ids)
    text = stub.Detokenize(pb.DetokenizeRequest(model=DEFAULT_MODEL, token_ids=tokens), timeout=10)
    assert text.text == "".join(event.delta.text for event in by_ids)


@pytest.mark.faults
def test_health_follows_the_workers_and_the_drain(start_cluster):
    cluster = start_cluster("--prefill", "0", settings={"drain_timeout_s": 10.0})
    heard: list[int] = []
    grown = threading.Condition()
    with grpc.insecure_channel(cluster.grpc_target) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service=SERVICE), timeout=150
        )

        def listen() -> None:
            try:
                for said in watch:
                    with grown:
                        heard.append(said.status)
                        grown.notify_all()
            except grpc.RpcError:  # the server has stopped
                pass

        def await_heard(*statuses: int) -> None:
            with grown:
                assert grown.wait_for(lambda: tuple(heard) == statuses, 60), heard

        listener = threading.Thread(target=listen)
        listener.start()
        try:
            await_heard(SERVING)
            os.kill(cluster.pids()["decode-0"], signal.SIGKILL)
            await_heard(SERVING, NOT_SERVING)  # nobody is left
            await_heard(SERVING, NOT_SERVING, SERVING)  # it was started again
            running = inference_pb2_grpc.InferenceServiceStub(channel).Generate(LONG, timeout=120)
            next(running)
            cluster.process.send_signal(signal.SIGTERM)
            await_heard(SERVING, NOT_SERVING, SERVING, NOT_SERVING)  # while a request still runs
            assert running.is_active()
            assert cluster.process.wait(60) == 0
        finally:
            watch.cancel()
            listener.join(30)
