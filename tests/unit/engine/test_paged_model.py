"""The paged forward pass: chunks, batches and stale memory do not change what is computed."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from core.messages import SamplingParams, TransferId
from engine.kernel_choice import choose_kernels
from engine.kv_cache import KvCache, KvSpec
from engine.llama import LayerWeights, LlamaModel, LlamaWeights
from engine.model_config import ModelConfig
from engine.runner import ModelRunner
from engine.step_batch import BatchItem, SampleRequest, StepBatch

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    num_layers=2,
    hidden_size=24,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=40,
    rope_theta=1000.0,
    rms_norm_eps=1e-5,
    vocab_size=61,
    tie_embeddings=False,
    context_window=256,
)
BLOCK_SIZE = 4


def random_weights() -> LlamaWeights:
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.3

    layers = tuple(
        LayerWeights(
            input_norm=1 + normal(24),
            qkv=normal((4 + 2 * 2) * 8, 24),
            output=normal(24, 32),
            post_norm=1 + normal(24),
            gate_up=normal(80, 24),
            down=normal(24, 40),
        )
        for _ in range(CONFIG.num_layers)
    )
    return LlamaWeights(
        embedding=normal(61, 24), layers=layers, final_norm=1 + normal(24), head=normal(61, 24)
    )


WEIGHTS = random_weights()


def naive_logits(tokens: list[int]) -> torch.Tensor:
    """The textbook decoder over a whole text, [tokens, vocab]: complex RoPE, no cache, no pages."""
    frequencies = CONFIG.rope_theta ** (-torch.arange(0, 8, 2) / 8)
    turn = torch.polar(torch.ones(len(tokens), 4), torch.arange(len(tokens))[:, None] * frequencies)

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + CONFIG.rms_norm_eps).sqrt() * weight

    def rotate(x: torch.Tensor) -> torch.Tensor:  # [tokens, heads, 8]
        turned = torch.complex(x[..., :4].contiguous(), x[..., 4:].contiguous()) * turn[:, None]
        return torch.cat((turned.real, turned.imag), -1)

    hidden = WEIGHTS.embedding[tokens]
    causal = torch.full((len(tokens), len(tokens)), float("-inf")).triu(1)
    for layer in WEIGHTS.layers:
        q, k, v = (norm(hidden, layer.input_norm) @ layer.qkv.T).split((32, 16, 16), -1)
        q, k, v = rotate(q.view(-1, 4, 8)), rotate(k.view(-1, 2, 8)), v.view(-1, 2, 8)
        heads = []
        for head in range(4):
            scores = q[:, head] @ k[:, head // 2].T / 8**0.5 + causal
            heads.append(scores.softmax(-1) @ v[:, head // 2])
        hidden = hidden + torch.cat(heads, -1) @ layer.output.T
        gate, up = (norm(hidden, layer.post_norm) @ layer.gate_up.T).split(40, -1)
        hidden = hidden + (F.silu(gate) * up) @ layer.down.T
    return norm(hidden, WEIGHTS.final_norm) @ WEIGHTS.head.T


@pytest.fixture
def kv() -> KvCache:
    spec = KvSpec(
        num_blocks=64,
        num_layers=2,
        block_size=BLOCK_SIZE,
        num_kv_heads=2,
        head_dim=8,
        dtype=torch.float32,
    )
    return KvCache(spec)


@pytest.fixture(params=["torch", "auto"])  # auto: the native kernels where there are any
def step(kv: KvCache, request: pytest.FixtureRequest) -> Callable[..., torch.Tensor]:
    kernels = choose_kernels(request.param, torch.float32, CONFIG.head_dim)
    runner = ModelRunner(LlamaModel(CONFIG, random_weights(), kernels), kv)

    def compute(*parts: tuple[list[int], int, int, tuple[int, ...]]) -> torch.Tensor:
        """Logits of (tokens, start, end, block ids) parts, all of which sample."""
        items = tuple(
            BatchItem(
                key=TransferId(request_id=str(index), attempt=0),
                start=start,
                token_ids=tuple(tokens[start:end]),
                block_ids=blocks,
                sample=SampleRequest(params=SamplingParams(), position=end),
            )
            for index, (tokens, start, end, blocks) in enumerate(parts)
        )
        with torch.inference_mode():
            return runner.logits(StepBatch(items=items))

    return compute


def text(length: int, salt: int = 0) -> list[int]:
    return [(i * i * 5 + salt * 7 + 3) % 61 for i in range(length)]


def close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(actual, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 23])
def test_a_whole_prompt_computes_the_textbook_decoder(
    step: Callable[..., torch.Tensor], length: int
) -> None:
    tokens = text(length)
    assert close(step((tokens, 0, length, tuple(range(9))))[0], naive_logits(tokens)[-1])


@pytest.mark.parametrize("cuts", [(1, 2), (4, 8), (5, 6), (3, 17), (19, 20)])
def test_chunks_over_scattered_blocks_compute_the_same(
    step: Callable[..., torch.Tensor], cuts: tuple[int, int]
) -> None:
    tokens = text(21)
    blocks = (40, 3, 17, 9, 62, 0)
    expected = naive_logits(tokens)
    for start, end in zip((0, *cuts), (*cuts, 21), strict=True):
        assert close(step((tokens, start, end, blocks))[0], expected[end - 1])


def test_decodes_and_chunks_of_unequal_lengths_share_a_step(
    step: Callable[..., torch.Tensor],
) -> None:
    lengths = (1, 2, 6, 7, 18, 30)
    texts = [text(length + 1, salt) for salt, length in enumerate(lengths)]
    blocks = [tuple(range(salt * 8, salt * 8 + 8)) for salt in range(len(lengths))]
    step(*((t, 0, n, b) for t, n, b in zip(texts, lengths, blocks, strict=True)))
    long = text(26, 11)
    step((long, 0, 9, tuple(range(48, 56))))

    parts = [(t, n, n + 1, b) for t, n, b in zip(texts, lengths, blocks, strict=True)]
    mixed = [*parts[:2], (long, 9, 26, tuple(range(48, 56))), *parts[2:]]
    rows = step(*mixed)

    for row, (tokens, _, end, _) in zip(rows, mixed, strict=True):
        assert close(row, naive_logits(tokens[:end])[-1])


def test_numbers_left_in_the_pool_by_others_cannot_reach_a_result(
    kv: KvCache, step: Callable[..., torch.Tensor]
) -> None:
    kv.pool.fill_(float("nan"))
    short, long = text(6), text(14, 1)
    step((short, 0, 5, (1, 2)), (long, 0, 9, (3, 4, 5, 6)))
    rows = step((short, 5, 6, (1, 2)), (long, 9, 10, (3, 4, 5, 6)))
    assert close(rows[0], naive_logits(short)[-1])
    assert close(rows[1], naive_logits(long[:10])[-1])
    assert close(step((long, 10, 14, (3, 4, 5, 6)))[0], naive_logits(long)[-1])


def test_a_step_writes_only_its_own_slots(kv: KvCache, step: Callable[..., torch.Tensor]) -> None:
    kv.pool.fill_(7.0)
    step((text(6), 0, 6, (10, 20)))
    untouched = torch.ones(64, BLOCK_SIZE, dtype=torch.bool)
    untouched[10] = False
    untouched[20, :2] = False
    by_token = kv.pool.permute(0, 3, 1, 2, 4, 5).flatten(2)
    assert bool((by_token[untouched] == 7.0).all())
    assert not bool((by_token[~untouched] == 7.0).any())


def test_a_step_that_samples_nothing_gives_no_tokens(kv: KvCache) -> None:
    item = BatchItem(
        key=TransferId(request_id="r", attempt=0),
        start=0,
        token_ids=(1, 2, 3),
        block_ids=(0,),
        sample=None,
    )
    runner = ModelRunner(LlamaModel(CONFIG, WEIGHTS), kv)
    assert runner.execute(StepBatch(items=(item,))) == ()
