"""Workers of several ranks: real processes, whose answers are those of transformers, in float32.

The models are small and random; which tokens they make depends on every head.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from bench.streams import generate
from core.config import EngineConfig
from core.messages import SamplingParams, TransferId
from core.model_card import ModelCard
from engine.host import EngineHost, build_host
from engine.sequence import SequenceKey
from engine.step_batch import BatchItem, SampledToken, SampleRequest, StepBatch

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

VOCAB, ANSWER = 97, 24
PROMPTS = [[(7 * i * i + 3 * n) % VOCAB for i in range(20 + 13 * n)] for n in range(4)]
TIMEOUT_S = 300.0
BYTES = {"add_prefix_space": False, "trim_offsets": False, "use_regex": False}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """8 heads and 2 KV heads, so that four ranks have two copies of each."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=1,
    )
    torch.manual_seed(3)
    made = LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if "norm" not in name:
                weight.normal_(std=2 * weight.shape[1] ** -0.5)
    folder = tmp_path_factory.mktemp("models") / "small"
    made.save_pretrained(folder)
    vocab = {chr(33 + i if i < 94 else 0xA1 - 94 + i): i for i in range(VOCAB)}
    tokenizer = {
        "version": "1.0",
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
        "decoder": {**BYTES, "type": "ByteLevel"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder, made


def greedy(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(ANSWER):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def serve(start_cluster, folder: Path, prefill: int, decode: int, **transfer: str):
    settings = {
        "drain_timeout_s": 10.0,
        "engine": {
            "prefill_tensor_parallel": prefill,
            "decode_tensor_parallel": decode,
            "prefill_kv_bytes": 2**24,
            "decode_kv_bytes": 2**24,
            "max_step_tokens": 32,  # prompts go in several chunks
        },
        "scheduler": {"local_prefill": "never"},
        "transfer": {"accept_timeout_s": 30.0, "arrive_timeout_s": 60.0, **transfer},
    }
    return start_cluster("--model", str(folder), settings=settings)


def answers(cluster) -> list[list[int]]:
    with cluster.client() as client:
        asked = [generate("small", p, max_tokens=ANSWER, ignore_eos=True) for p in PROMPTS]
        streams = client.answer_all(asked, timeout_s=TIMEOUT_S)
    assert [stream.details for stream in streams] == [""] * len(PROMPTS)
    return [stream.token_ids for stream in streams]


def followers_of(pid: int) -> list[int]:
    """The other ranks of a worker, by their pids."""
    children = [
        child
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]
    return [
        int(child)
        for child in children
        if b"engine.parallel.follower" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
    ("prefill", "decode", "transport", "push"),
    [
        (1, 1, "shm", "layers"),
        (2, 1, "shm", "blocks"),
        (1, 2, "tcp", "layers"),
        (2, 4, "tcp", "blocks"),
        (4, 2, "shm", "layers"),
    ],
)
def test_a_hand_off_between_any_numbers_of_ranks_keeps_every_token(
    start_cluster, model, eventually, prefill, decode, transport, push
):
    folder, reference = model
    cluster = serve(start_cluster, folder, prefill, decode, transport=transport, push=push)
    pids = cluster.pids()
    assert len(followers_of(pids["prefill-0"])) == prefill - 1
    followers = followers_of(pids["decode-0"])
    assert len(followers) == decode - 1
    assert answers(cluster) == [greedy(reference, prompt) for prompt in PROMPTS]
    eventually(cluster.is_at_rest, "all blocks are free", timeout_s=60)
    assert cluster.stop(timeout_s=120) == 0
    assert not any(map(is_running, followers))


def test_a_rank_that_dies_ends_its_worker_which_comes_back(start_cluster, model, eventually):
    folder, reference = model
    cluster = serve(start_cluster, folder, 1, 2)
    pid = cluster.pids()["decode-0"]
    (follower,) = followers_of(pid)
    os.kill(follower, signal.SIGKILL)
    eventually(
        lambda: cluster.has_replaced("decode-0", pid), "another life serves", timeout_s=TIMEOUT_S
    )
    assert not is_running(pid)
    (event,) = cluster.events("rank_lost")
    assert event["why"] == "rank 1 ended with code -9"
    eventually(cluster.is_at_rest, "it is known", timeout_s=60)
    assert answers(cluster)[0] == greedy(reference, PROMPTS[0])


def test_a_worker_that_is_killed_takes_its_ranks_along(start_cluster, model, eventually):
    cluster = serve(start_cluster, model[0], 2, 1)
    pid = cluster.pids()["prefill-0"]
    (follower,) = followers_of(pid)
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not is_running(follower), "its rank is gone", timeout_s=60)


def test_ranks_that_do_not_divide_the_heads_are_refused_in_one_line(tmp_path):
    """SmolLM2 has 9 heads and 3 KV heads."""
    config = tmp_path / "c.toml"
    config.write_text(
        "[gateway]\nhttp_port = 0\ngrpc_port = 0\n[scheduler]\nadmin_port = 0\n"
        "[engine]\ndecode_tensor_parallel = 2\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "cli.main", "serve", "--config", str(config)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
    )
    assert done.returncode != 0
    said = "engine.decode_tensor_parallel: 2 does not divide the model's 9 attention heads"
    assert said in done.stderr


async def test_the_real_model_gives_the_same_tokens_on_three_ranks(card: ModelCard) -> None:
    alone, together = [await greedy_tokens(card, ranks) for ranks in (1, 3)]
    assert alone == together


async def built(card: ModelCard, ranks: int) -> EngineHost:
    config = EngineConfig(dtype="float32", prefix_cache=False)
    return await build_host(
        card, config, kv_bytes=2**26, threads=1, secret=b"0123456789abcdef", ranks=ranks
    )


async def greedy_tokens(card: ModelCard, ranks: int) -> list[int]:
    host = await built(card, ranks)
    tokens, start = list(range(1000, 1040)), 0
    with host.blocks.acquire(4) as lease:
        for _ in range(16):
            item = BatchItem(
                key=SequenceKey(TransferId(request_id="r", attempt=0)),
                start=start,
                token_ids=tuple(tokens[start:]),
                block_ids=lease.block_ids,
                sample=SampleRequest(params=SamplingParams(temperature=0.0), position=len(tokens)),
            )
            start = len(tokens)
            (got,) = await host.compute.run(host.runner.execute, StepBatch(items=(item,)))
            assert isinstance(got, SampledToken)
            tokens.append(got.token_id)
    await host.close()
    return tokens[40:]
