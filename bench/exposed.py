"""How much of the time to first token a hand-off adds where nothing is computed meanwhile.

Asks a real cluster for one token after prompts of several lengths, one at a time, and reads the
timing that comes with each answer: `transfer_tail_s` is what passed at the decode worker between
its order and the commit beyond the prefill itself, `adopt_s` from the commit to the first token.
"""

import statistics
from dataclasses import dataclass

import grpc

from bench.cluster import ALWAYS_HAND_OVER, merged, serving
from protos.tandem.v1 import inference_pb2, inference_pb2_grpc

PROMPT_TOKENS = (512, 1024, 2048)
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposure:
    """Medians over the answers to prompts of one length."""

    tokens: int
    ttft_ms: float
    transfer_tail_ms: float
    adopt_ms: float
    share: float  # of the two in the TTFT


def measure_exposed(transport: str, rounds: int) -> list[Exposure]:
    """The default model in bfloat16, one prefill and one decode worker."""
    settings = merged(
        ALWAYS_HAND_OVER, {"transfer": {"transport": transport}, "log_level": "warning"}
    )
    with serving(settings) as endpoints, grpc.insecure_channel(endpoints.grpc) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        return [_measure(stub, endpoints.model, tokens, rounds) for tokens in PROMPT_TOKENS]


def _measure(
    stub: inference_pb2_grpc.InferenceServiceStub, model: str, tokens: int, rounds: int
) -> Exposure:
    timings = []
    for number in range(rounds + 1):
        request = inference_pb2.GenerateRequest(
            model=model,
            token_ids=inference_pb2.TokenIds(
                ids=[1000 + (7 * i + number) % 9000 for i in range(tokens)]
            ),
            # Two tokens: the KV of a request that ends with its first is not handed over at all.
            sampling=inference_pb2.SamplingOptions(temperature=0, max_tokens=2, ignore_eos=True),
        )
        events = list(stub.Generate(request, timeout=_TIMEOUT_S))
        timings.append(events[-1].finished.timing)
    timings = timings[1:]  # the first one warms up
    return Exposure(
        tokens=tokens,
        ttft_ms=1e3 * statistics.median(t.ttft_s for t in timings),
        transfer_tail_ms=1e3 * statistics.median(t.transfer_tail_s for t in timings),
        adopt_ms=1e3 * statistics.median(t.adopt_s for t in timings),
        share=statistics.median((t.transfer_tail_s + t.adopt_s) / t.ttft_s for t in timings),
    )
