"""Streams an answer over gRPC: python examples/grpc_chat.py "Hello"."""

import os
import sys

import grpc

from core.rpc import CLIENT_OPTIONS
from protos.tandem.v1 import inference_pb2 as pb
from protos.tandem.v1.inference_pb2_grpc import InferenceServiceStub

question = sys.argv[1] if len(sys.argv) > 1 else "What is the capital of France?"
target = os.environ.get("TANDEM_GRPC", "127.0.0.1:50051")

with grpc.insecure_channel(target, options=CLIENT_OPTIONS) as channel:
    service = InferenceServiceStub(channel)
    try:
        model = service.ListModels(pb.ListModelsRequest(), timeout=10).models[0].id
        request = pb.ChatRequest(
            model=model,
            messages=[pb.ChatMessage(role="user", content=question)],
            sampling=pb.SamplingOptions(temperature=0, max_tokens=256),
        )
        for event in service.Chat(request, timeout=120):
            if event.HasField("delta"):
                print(event.delta.text, end="", flush=True)
            else:
                reason = pb.StopReason.Name(event.finished.stop_reason)
                print(f"\n[{reason}, {event.finished.usage.completion_tokens} tokens]")
    except grpc.RpcError as error:
        sys.exit(f"{target}: {error.code().name}: {error.details()}")
