"""Log probabilities of prompts are transformers', whatever chunks and batches they are read in."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from core.messages import SamplingParams, TokenLogprobs, TransferId
from engine import logprobs
from engine.batching import StepBudget
from engine.block_manager import BlockManager
from engine.compute_thread import ComputeThread
from engine.engine import Engine, SequenceEvent
from engine.kv_cache import KvCache, KvSpec
from engine.llama import LlamaModel
from engine.loader import open_source
from engine.runner import ModelRunner
from engine.sequence import Sequence, SequenceKey
from engine.weights import load_weights

BLOCK_SIZE, TOP, VOCAB = 16, 3, 97
PROMPTS = {
    "long": [(7 * i * i + 3) % VOCAB for i in range(90)],
    "short": [(5 * i + 1) % VOCAB for i in range(5)],
    "one": [4],
    "unasked": [(3 * i) % VOCAB for i in range(40)],
}


class CountingModel:
    """The model, and the most rows of logits that it was asked for at once."""

    def __init__(self, model: LlamaModel) -> None:
        self.forward = model.forward
        self._logits = model.logits
        self.most_rows = 0

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.most_rows = max(self.most_rows, len(hidden))
        return self._logits(hidden)


async def read(path: Path) -> tuple[dict[str, list[TokenLogprobs]], int]:
    """What the engine tells of each prompt, and the most rows of logits at once."""
    source = open_source(path)
    config = source.config()
    model = CountingModel(
        LlamaModel(config, load_weights(source, config, torch.float32, progress=False))
    )
    spec = KvSpec(
        num_blocks=32,
        num_layers=config.num_layers,
        block_size=BLOCK_SIZE,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=torch.float32,
    )
    told: dict[str, list[TokenLogprobs]] = {name: [] for name in PROMPTS}
    going = set(PROMPTS)
    done = asyncio.Event()

    def stepped(events: tuple[SequenceEvent, ...]) -> None:
        for event in events:
            name = event.key.transfer.request_id
            assert name in going, "all is told before the first token"
            told[name] += event.prompt_logprobs
            if event.token_id is not None:
                going.discard(name)
        if not going:
            done.set()

    def failed(keys: tuple[SequenceKey, ...], error: Exception) -> None:
        raise error

    compute = ComputeThread(threads=1)
    blocks = BlockManager(spec.num_blocks)
    engine = Engine(
        runner=ModelRunner(model, KvCache(spec)),  # type: ignore[arg-type]
        compute=compute,
        blocks=blocks,
        block_size=BLOCK_SIZE,
        budget=StepBudget(max_tokens=70, max_seqs=8),
        eos_token_ids=(),
        on_step=stepped,
        on_error=failed,
    )
    for name, prompt in PROMPTS.items():
        engine.add(
            Sequence(
                key=SequenceKey(TransferId(request_id=name, attempt=1)),
                token_ids=list(prompt),
                num_prompt_tokens=len(prompt),
                lease=blocks.acquire(-(-len(prompt) // BLOCK_SIZE)),
                sampling=SamplingParams(
                    max_new_tokens=1, prompt_logprobs=name != "unasked", top_prompt_logprobs=TOP
                ),
                prefill_only=True,
            )
        )
    loop = asyncio.create_task(engine.run())
    try:
        async with asyncio.timeout(60):
            await done.wait()
    finally:
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)
        await compute.close()
    return told, model.most_rows


async def test_prompts_are_scored_as_transformers_scores_them(
    tmp_path: Path, build_model: Callable[..., PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_model("Llama")
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(logprobs, "_ROWS_AT_ONCE", 8)
    told, most_rows = await read(tmp_path)
    assert told["unasked"] == told["one"] == []
    for name in ("long", "short"):
        prompt = PROMPTS[name]
        with torch.inference_mode():
            expected = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(dim=-1)
        found = told[name]
        assert len(found) == len(prompt) - 1
        values = expected[torch.arange(len(found)), torch.tensor(prompt[1:])].tolist()
        assert [each.logprob for each in found] == pytest.approx(values, abs=1e-3)
        best = expected.topk(TOP)
        assert [list(each.top_token_ids) for each in found] == best.indices.tolist()
        for each, likeliest in zip(found, best.values.tolist(), strict=True):
            assert each.top_logprobs == pytest.approx(likeliest, abs=1e-3)
    assert most_rows <= 8, "a long prompt's logits never exist at once"
