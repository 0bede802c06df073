"""Whether a split cluster writes the tokens that Hugging Face transformers would write.

`python -m bench.parity` serves the default model in float32 over each transport, asks for 64 greedy
tokens to each prompt, once one after the other and once many at a time, and compares. Ends with one
line of JSON; exits with 1 where a token differs.
"""

import argparse
import asyncio
import json
import subprocess
import sys
from pathlib import Path

import grpc

from bench.cluster import ALWAYS_HAND_OVER, Endpoints, merged, serving
from bench.parity_prompts import BLOCK_SIZE, CHUNK_TOKENS, parity_prompts
from bench.reference import Reference
from core.config import DEFAULT_MODEL
from core.model_card import ModelCard
from protos.tandem.v1 import inference_pb2, inference_pb2_grpc

ANSWER_TOKENS = 64
_ANSWER_TIMEOUT_S = 300.0


async def answer(
    stub: "inference_pb2_grpc.InferenceServiceAsyncStub", model: str, prompt: list[int]
) -> list[int]:
    """The cluster's greedy answer, past any end-of-sequence token."""
    request = inference_pb2.GenerateRequest(
        model=model,
        token_ids=inference_pb2.TokenIds(ids=prompt),
        sampling=inference_pb2.SamplingOptions(
            temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True
        ),
    )
    tokens: list[int] = []
    async for response in stub.Generate(request, timeout=_ANSWER_TIMEOUT_S):
        tokens += response.delta.token_ids
    return tokens


async def answers(
    endpoints: Endpoints, prompts: list[list[int]], *, at_once: int
) -> list[list[int]]:
    """The answers to all prompts, this many at a time."""
    async with grpc.aio.insecure_channel(endpoints.grpc) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        room = asyncio.Semaphore(at_once)

        async def one(prompt: list[int]) -> list[int]:
            async with room:
                return await answer(stub, endpoints.model, prompt)

        return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))


def settings(transport: str, push: str = "auto") -> dict[str, object]:
    """A float32 cluster with chunks so small that the longer prompts take several."""
    wanted = {
        "engine": {
            "dtype": "float32",
            "block_size": BLOCK_SIZE,
            "max_step_tokens": CHUNK_TOKENS,
            "prefill_kv_bytes": 2**29,
            "decode_kv_bytes": 2**29,
        },
        "transfer": {"transport": transport, "push": push},
        "log_level": "warning",
    }
    return merged(ALWAYS_HAND_OVER, wanted)


def count_mismatches(reference: Reference, prompts: list[list[int]], texts: list[list[int]]) -> int:
    """Tokens that differ or are missing, over all prompts."""
    wrong = 0
    for prompt, text in zip(prompts, texts, strict=True):
        wrong += ANSWER_TOKENS - len(text) + reference.num_wrong(prompt, text)
    return wrong


def main() -> None:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transports", default="shm,tcp")
    parser.add_argument("--at-once", type=int, default=16)
    args = parser.parse_args()
    prepared = subprocess.run(
        [sys.executable, "-m", "engine.prepare", DEFAULT_MODEL], stdout=subprocess.PIPE, check=True
    )
    card = ModelCard.load(Path(prepared.stdout.decode().strip()))
    prompts = parity_prompts(card.tokenizer_path)
    print("reading the model with transformers …", file=sys.stderr)
    reference = Reference.from_gguf(Path(card.source))
    mismatches: dict[str, int] = {}
    for transport in args.transports.split(","):
        with serving(settings(transport)) as endpoints:
            for at_once in (1, args.at_once):
                name = transport if at_once == 1 else f"{transport}, {at_once} at once"
                texts = asyncio.run(answers(endpoints, prompts, at_once=at_once))
                mismatches[name] = count_mismatches(reference, prompts, texts)
                print(f"{name}: {mismatches[name]} mismatches", file=sys.stderr)
    result = {
        "prompts": len(prompts),
        "tokens": len(prompts) * ANSWER_TOKENS,
        "mismatches": mismatches,
    }
    print(json.dumps(result))
    sys.exit(1 if any(mismatches.values()) else 0)


if __name__ == "__main__":
    main()
