"""Small random models made by transformers, and the engine's answers from their files."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from core.messages import SamplingParams, TransferId
from engine.kv_cache import KvCache, KvSpec
from engine.llama import LlamaModel
from engine.loader import open_source
from engine.runner import ModelRunner
from engine.step_batch import BatchItem, SampleRequest, StepBatch
from engine.weights import load_weights

VOCAB, STEPS, BLOCK_SIZE = 97, 32, 16
# The rows of every matrix are multiples of 32 numbers, which is what quantised types need.
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "attn_implementation": "eager",
}

BuildModel = Callable[..., PreTrainedModel]
Answers = list[tuple[list[int], torch.Tensor]]
Answer = Callable[[Path], Answers]


@pytest.fixture(scope="session")
def build_model() -> BuildModel:
    """A model of kind "Llama", "Mistral", "Qwen2" or "Qwen3"; settings go before SHAPE's."""
    return _build_model


def _build_model(kind: str, **settings: Any) -> PreTrainedModel:
    config = getattr(transformers, f"{kind}Config")(**SHAPE | settings)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if "norm" in name:
                weight.copy_(1 + 0.3 * noise)
            else:
                weight.copy_(noise * (0.5 if weight.ndim == 1 else 2 * weight.shape[1] ** -0.5))
    return model


@pytest.fixture(scope="session")
def answer() -> Answer:
    """The engine's greedy tokens, prompt included, and its logits [STEPS, vocab], per prompt."""
    return _answer


@dataclass
class _Text:
    """A prompt of its own length, cut into chunks, and what follows it."""

    tokens: list[int]
    chunks: list[int]
    block_ids: tuple[int, ...]


def _answer(path: Path) -> Answers:
    source = open_source(path)
    config = source.config()
    model = LlamaModel(config, load_weights(source, config, torch.float32, progress=False))
    spec = KvSpec(
        num_blocks=16,
        num_layers=config.num_layers,
        block_size=BLOCK_SIZE,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=torch.float32,
    )
    return _answers_of(ModelRunner(model, KvCache(spec)), STEPS)


@pytest.fixture(scope="session")
def answers_of() -> Callable[[ModelRunner, int], Answers]:
    """The same of a runner of 16 blocks, so many steps of it."""
    return _answers_of


def _answers_of(runner: ModelRunner, steps: int) -> Answers:
    texts = [
        _Text(
            [(7 * i * i + 3) % VOCAB for i in range(90)], [37, 16, 36, 1], tuple(range(9, 1, -1))
        ),
        _Text([(5 * i + 1) % VOCAB for i in range(5)], [2, 1, 1, 1], (15, 0, 11)),
    ]
    prompts = [list(text.tokens) for text in texts]
    starts = [0, 0]
    rows = torch.empty(0)
    for turn in range(4):
        parts = [
            (start, start + text.chunks[turn]) for start, text in zip(starts, texts, strict=True)
        ]
        rows = _step(runner, texts, parts)
        starts = [end for _, end in parts]
    logits = []
    for _ in range(steps):
        logits.append(rows)
        for text, row in zip(texts, rows, strict=True):
            text.tokens.append(int(row.argmax()))
        rows = _step(runner, texts, [(len(t.tokens) - 1, len(t.tokens)) for t in texts])
    by_text = torch.stack(logits, dim=1)
    assert [t.tokens[: len(p)] for t, p in zip(texts, prompts, strict=True)] == prompts
    return [(text.tokens, rows) for text, rows in zip(texts, by_text, strict=True)]


def _step(runner: ModelRunner, texts: list[_Text], parts: list[tuple[int, int]]) -> torch.Tensor:
    items = tuple(
        BatchItem(
            key=TransferId(request_id=str(index), attempt=0),
            start=start,
            token_ids=tuple(text.tokens[start:end]),
            block_ids=text.block_ids,
            sample=SampleRequest(params=SamplingParams(), position=end),
        )
        for index, (text, (start, end)) in enumerate(zip(texts, parts, strict=True))
    )
    with torch.inference_mode():
        return runner.logits(StepBatch(items=items))


@pytest.fixture(scope="session")
def assert_equal() -> Callable[[PreTrainedModel, Answers], None]:
    """Asserts that transformers computes the same logits, and so the same greedy tokens."""
    return _assert_equal


def _assert_equal(model: PreTrainedModel, answers: Answers) -> None:
    for tokens, logits in answers:
        with torch.inference_mode():
            expected = model(torch.tensor([tokens])).logits[0, -len(logits) - 1 : -1]
        assert tokens[-len(logits) :] == expected.argmax(dim=-1).tolist()
        difference = (logits - expected).abs().max() / expected.abs().max()
        assert difference < 1e-4, f"logits differ by {difference:.1e}"
        assert len(set(tokens[-len(logits) :])) > 4, "a model that repeats itself shows little"
