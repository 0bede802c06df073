"""A whole model by the Triton kernels, in the interpreter; what is said where they cannot run."""

import os
import subprocess
import sys

import pytest
import torch

from core.errors import ConfigError
from core.messages import SamplingParams, TransferId
from engine.kernel_choice import choose_kernels
from engine.kv_cache import KvCache, KvSpec
from engine.llama import LlamaModel
from engine.runner import ModelRunner
from engine.sequence import SequenceKey
from engine.step_batch import BatchItem, SampledToken, SampleRequest, StepBatch
from engine.triton import runtime
from tests.unit.engine.test_paged_model import BLOCK_SIZE, CONFIG, random_weights, text

NUM_TOKENS = 6
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
PROMPTS = (text(9), text(5, 3))


def greedy(kernels_name: str) -> list[list[int]]:
    """Two answers computed together, the longer prompt in two chunks."""
    kernels = choose_kernels(kernels_name, torch.float32, CONFIG.head_dim)
    spec = KvSpec(
        num_blocks=16,
        num_layers=CONFIG.num_layers,
        block_size=BLOCK_SIZE,
        num_kv_heads=CONFIG.num_kv_heads,
        head_dim=CONFIG.head_dim,
        dtype=torch.float32,
    )
    runner = ModelRunner(LlamaModel(CONFIG, random_weights(), kernels), KvCache(spec))
    tokens = [list(prompt) for prompt in PROMPTS]

    def step(*parts: tuple[int, int, int, bool]) -> None:
        items = tuple(
            BatchItem(
                key=SequenceKey(TransferId(request_id=str(row), attempt=0)),
                start=start,
                token_ids=tuple(tokens[row][start:end]),
                block_ids=tuple(range(15 - 8 * row, 7 - 8 * row, -1)),
                sample=SampleRequest(params=GREEDY, position=end) if samples else None,
            )
            for row, start, end, samples in parts
        )
        for sampled in runner.execute(StepBatch(items=items)):
            assert isinstance(sampled, SampledToken)
            tokens[int(sampled.key.transfer.request_id)].append(sampled.token_id)

    step((0, 0, 6, False), (1, 0, 5, True))
    step((0, 6, 9, True), (1, 5, 6, True))
    for _ in range(NUM_TOKENS):
        step(*((row, len(tokens[row]) - 1, len(tokens[row]), True) for row in range(2)))
    return tokens


@pytest.mark.skipif(not runtime.interpreted(), reason="the interpreter is for hosts without a GPU")
def test_the_tokens_are_those_of_torch() -> None:
    pytest.importorskip("triton")
    assert greedy("triton") == greedy("torch")


_CHOOSE = """
import torch
from engine.kernel_choice import choose_kernels
from core.errors import ConfigError
for kernels, attention in (("triton", "auto"), ("torch", "triton")):
    try:
        choose_kernels(kernels, torch.float32, 64, attention=attention)
    except ConfigError as error:
        print(error.message)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_they_are_refused_in_one_line() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", _CHOOSE],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    first, second = (line for line in done.stdout.splitlines() if line.startswith("engine."))
    assert first.startswith("engine.kernels: triton ones cannot be had: ")
    assert second.startswith("engine.attention: triton cannot be had: ")


def test_attention_can_be_anothers_than_the_kernels() -> None:
    kernels = choose_kernels("auto", torch.float32, 64, attention="torch")
    assert kernels.attention.name == "torch"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_native_kernels_are_not_for_gpus() -> None:
    with pytest.raises(ConfigError, match=r"engine\.kernels: native.*engine\.device is cuda"):
        choose_kernels("native", torch.float32, 64, device=torch.device("cuda"))
