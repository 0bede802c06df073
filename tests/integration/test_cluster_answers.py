"""A split cluster answers as one process would: right tokens, unmixed, with every block back."""

import asyncio
import threading

import grpc
import httpx
import pytest

from bench import parity
from bench.cluster import Endpoints, serving
from bench.parity_prompts import parity_prompts
from protos.tandem.v1 import inference_pb2, inference_pb2_grpc

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

NUM_STREAMS = 64


@pytest.fixture(scope="module", params=[("shm", "auto"), ("tcp", "layers")], ids="-".join)
def endpoints(request: pytest.FixtureRequest) -> Endpoints:
    """shm with whole blocks (what the link's cost says), tcp with the last chunk layer by layer."""
    with serving(parity.settings(*request.param)) as found:
        yield found


def blocks_in_use(endpoints: Endpoints) -> list[dict[str, object]]:
    """Workers with blocks that a request holds."""
    answer = httpx.get(f"{endpoints.admin}/cluster", timeout=10, trust_env=False).json()
    workers = answer["workers"]
    assert len(workers) == 2
    assert all(sum(each["blocks"].values()) == each["num_blocks"] for each in workers)
    held = ("owned", "in_transfer", "quarantined")
    return [each for each in workers if any(each["blocks"][state] for state in held)]


def test_tokens_are_those_of_transformers(endpoints, card, reference, eventually):
    """Sixteen at once, interleaved: prompts of one token to several blocks beyond three chunks."""
    prompts = parity_prompts(card.tokenizer_path)
    texts = asyncio.run(parity.answers(endpoints, prompts, at_once=16))
    assert len(prompts) >= 20
    assert parity.count_mismatches(reference, prompts, texts) == 0
    eventually(lambda: not blocks_in_use(endpoints), "all blocks are free", timeout_s=30)


def test_what_the_pair_achieved_is_exported(endpoints, card):
    """The transport, its bytes and its busy time, as Prometheus text."""
    prompts = parity_prompts(card.tokenizer_path)[-2:]
    assert all(asyncio.run(parity.answers(endpoints, prompts, at_once=1)))
    found = httpx.get(f"{endpoints.admin}/sd", timeout=10, trust_env=False).json()
    (address,) = (each["targets"][0] for each in found if each["labels"]["process"] == "prefill-0")
    text = httpx.get(f"http://{address}/metrics", timeout=10, trust_env=False).text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))

    def of_transfers(what: str) -> float:
        for transport in ("shm", "tcp"):
            key = f'tandem_kv_transfer_{what}_total{{transport="{transport}"}}'
            if float(values.get(key, 0)):
                return float(values[key])
        return 0.0

    sent, busy_s = of_transfers("bytes_sent"), of_transfers("busy_seconds")
    assert sent > 1e6
    assert 0.01 < sent / busy_s / 1e9 < 1000  # GB/s
    assert of_transfers("fallbacks") == 0


def test_a_lone_request_gets_the_same_tokens(endpoints, card, reference):
    prompts = parity_prompts(card.tokenizer_path)[-2:]
    texts = asyncio.run(parity.answers(endpoints, prompts, at_once=1))
    assert parity.count_mismatches(reference, prompts, texts) == 0


async def seeded(endpoints: Endpoints, stub, number: int) -> tuple[str, list[int]]:
    """A sampled answer whose tokens follow from the number alone, and its text."""
    request = inference_pb2.GenerateRequest(
        model=endpoints.model,
        text=f"Item {number} of the list is",
        sampling=inference_pb2.SamplingOptions(
            temperature=0.9, top_p=0.95, seed=number, max_tokens=24, ignore_eos=True
        ),
    )
    text, tokens = "", []
    async for response in stub.Generate(request, timeout=200):
        text += response.delta.text
        tokens += response.delta.token_ids
    return text, tokens


def test_sixty_four_streams_finish_unmixed_and_leave_every_block_free(endpoints, eventually):
    """A sampled answer depends on its own prompt and seed, so a swapped token would show."""

    async def run() -> tuple[list[tuple[str, list[int]]], list[tuple[str, list[int]]]]:
        async with grpc.aio.insecure_channel(endpoints.grpc) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            together = await asyncio.gather(
                *(seeded(endpoints, stub, number) for number in range(NUM_STREAMS))
            )
            alone = [await seeded(endpoints, stub, number) for number in range(0, NUM_STREAMS, 16)]
            return list(together), alone

    together, alone = asyncio.run(run())
    assert all(len(tokens) == 24 for _, tokens in together)
    assert len({tuple(tokens) for _, tokens in together}) == NUM_STREAMS
    assert together[::16] == alone
    eventually(lambda: not blocks_in_use(endpoints), "all blocks are free", timeout_s=30)


def test_a_client_that_leaves_frees_its_blocks(endpoints, eventually):
    body = {
        "model": endpoints.model,
        "messages": [{"role": "user", "content": "Write a very long story."}],
        "stream": True,
        "max_tokens": 2000,
        "ignore_eos": True,
    }
    url = f"{endpoints.http}/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=60, trust_env=False) as response:
        assert response.status_code == 200
        assert next(response.iter_lines()).startswith("data:")
    eventually(lambda: not blocks_in_use(endpoints), "all blocks are free", timeout_s=30)


def test_a_client_that_leaves_before_the_answer_frees_its_blocks(endpoints, eventually):
    body = {"model": endpoints.model, "prompt": "Once", "max_tokens": 2000, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{endpoints.http}/completions", json=body, timeout=1.5, trust_env=False)
    eventually(lambda: not blocks_in_use(endpoints), "all blocks are free", timeout_s=30)


def test_a_deadline_ends_the_request_and_frees_its_blocks(endpoints, eventually):
    request = inference_pb2.GenerateRequest(
        model=endpoints.model,
        text="Once upon a time",
        sampling=inference_pb2.SamplingOptions(max_tokens=2000, ignore_eos=True),
    )
    with grpc.insecure_channel(endpoints.grpc) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(request, timeout=1.0))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    eventually(lambda: not blocks_in_use(endpoints), "all blocks are free", timeout_s=30)


def test_a_burst_beyond_the_batch_queues_and_finishes(endpoints, eventually):
    """More requests than one decode batch holds, by plain HTTP, from threads."""
    statuses: list[int] = []

    def ask() -> None:
        body = {"model": endpoints.model, "prompt": "One, two,", "max_tokens": 4}
        answer = httpx.post(
            f"{endpoints.http}/completions", json=body, timeout=120, trust_env=False
        )
        statuses.append(answer.status_code)

    threads = [threading.Thread(target=ask) for _ in range(80)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [200] * 80
    eventually(lambda: not blocks_in_use(endpoints), "all blocks are free", timeout_s=30)
