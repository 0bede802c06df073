"""Captured decode steps: which graph serves a batch, and what its static buffers hold then.

The graphs here are recordings that replay by calling again, over the same static buffers.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from core.messages import SamplingParams, TransferId
from engine.attention import AttentionRow
from engine.graphs import DecodeGraphs, DecodeInputs, buckets
from engine.kernel_choice import choose_kernels
from engine.kv_cache import KvCache, KvSpec
from engine.llama import LlamaModel
from engine.runner import ModelRunner
from engine.sequence import SequenceKey
from engine.step_batch import BatchItem, SampleRequest, StepBatch
from engine.triton import runtime
from tests.unit.engine.test_paged_model import BLOCK_SIZE, CONFIG, random_weights, text

SPEC = KvSpec(
    num_blocks=32,
    num_layers=CONFIG.num_layers,
    block_size=BLOCK_SIZE,
    num_kv_heads=CONFIG.num_kv_heads,
    head_dim=CONFIG.head_dim,
    dtype=torch.float32,
)


class Recording:
    """A capture whose replay calls the work again; as a graph, it keeps its output's memory."""

    def __init__(self) -> None:
        self.replays = 0

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        work()

        def replay() -> None:
            self.replays += 1
            work()

        return replay


class Seen:
    """A forward pass that notes its inputs; the hidden state of a row is its token's id."""

    def __init__(self) -> None:
        self.inputs: list[DecodeInputs] = []

    def __call__(self, inputs: DecodeInputs) -> Tensor:
        self.inputs.append(inputs)
        return inputs.token_ids[:, None].float()


def graphs(
    forward: Callable[[DecodeInputs], Tensor], capture: Callable[..., object]
) -> DecodeGraphs:
    made = DecodeGraphs(forward, KvCache(SPEC), max_seqs=6, window=18, capture=capture)
    made.capture_all()
    return made


def row(start: int, *blocks: int, num_tokens: int = 1) -> AttentionRow:
    return AttentionRow(start=start, num_tokens=num_tokens, block_ids=blocks)


def test_buckets_end_with_the_most_sequences_of_a_step() -> None:
    assert buckets(1) == (1,)
    assert buckets(6) == (1, 2, 4, 6)
    assert buckets(8) == (1, 2, 4, 8)
    assert buckets(40) == (1, 2, 4, 8, 16, 24, 32, 40)


def test_the_smallest_graph_that_holds_the_batch_is_taken() -> None:
    made = graphs(Seen(), Recording())
    assert made.sizes == (1, 2, 4, 6)
    sizes = [made.bucket([row(3, 1)] * count) for count in range(8)]
    assert sizes == [None, 1, 2, 4, 4, 6, 6, None]


def test_prompts_and_contexts_beyond_the_tables_are_not_for_graphs() -> None:
    made = graphs(Seen(), Recording())
    assert made.bucket([row(3, 1), row(0, 2, num_tokens=2)]) is None
    assert made.bucket([row(19, 1, 2, 3, 4, 5)]) == 1
    assert made.bucket([row(20, 1, 2, 3, 4, 5, 6)]) is None


def test_static_buffers_hold_the_step_and_rows_that_are_nobodys() -> None:
    seen, recording = Seen(), Recording()
    made = graphs(seen, recording)
    first = made.run([row(5, 7, 8), row(3, 2), row(17, 1, 3, 4, 5, 6)], [10, 11, 12], 4)
    inputs = seen.inputs[-1]

    assert first.flatten().tolist() == [10, 11, 12]
    assert recording.replays == 1
    assert inputs.token_ids.tolist() == [10, 11, 12, 0]
    assert inputs.positions.tolist() == [5, 3, 17, 0]
    assert inputs.tensors.slot_mapping.tolist() == [8 * 4 + 1, 2 * 4 + 3, 6 * 4 + 1, -1]
    assert inputs.tensors.context_lens.tolist() == [6, 4, 18, 0]
    assert inputs.tensors.block_table[:3, :2].tolist() == [[7, 8], [2, 0], [1, 3]]

    made.run([row(6, 9, 8), row(3, 2), row(4, 5, 6)], [1, 2, 3], 4)
    assert seen.inputs[-1].tensors.context_lens.tolist() == [7, 4, 5, 0]
    assert seen.inputs[-1].tensors.block_table[:3, :2].tolist() == [[9, 8], [2, 0], [5, 6]]
    made.run([row(4, 5, 6)], [3], 1)
    larger, smaller = seen.inputs[-2], seen.inputs[-1]
    assert smaller.token_ids.data_ptr() == larger.token_ids.data_ptr()


def test_a_bucket_that_the_device_refuses_stays_eager() -> None:
    class Refusing(Recording):
        def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
            replay = super().__call__(work)
            if seen.inputs[-1].token_ids.shape[0] == 4:
                raise RuntimeError("out of memory")
            return replay

    seen = Seen()
    made = graphs(seen, Refusing())
    assert made.sizes == (1, 2, 6)
    assert made.bucket([row(3, 1)] * 3) == 6


@pytest.mark.skipif(not runtime.interpreted(), reason="on a GPU `make test-gpu` replays graphs")
def test_replayed_steps_give_the_logits_of_eager_ones() -> None:
    pytest.importorskip("triton")
    kernels = choose_kernels("triton", torch.float32, CONFIG.head_dim)
    model = LlamaModel(CONFIG, random_weights(), kernels)
    eager, replayed = KvCache(SPEC), KvCache(SPEC)

    class Largest(Recording):
        """Captures the largest bucket alone, so that every batch has rows that are nobody's."""

        captured = False

        def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
            if self.captured:
                raise RuntimeError("one is enough")
            self.captured = True
            return super().__call__(work)

    recording = Largest()
    runner = ModelRunner(model, replayed)
    runner.graphs = DecodeGraphs(
        lambda inputs: model.forward_decode(inputs, replayed),
        replayed,
        max_seqs=3,
        window=16,
        capture=recording,
    )
    with torch.inference_mode():
        runner.graphs.capture_all()
    prompts = [text(5), text(7, 3)]

    def step(parts: list[tuple[int, int, int]]) -> StepBatch:
        return StepBatch(
            items=tuple(
                BatchItem(
                    key=SequenceKey(TransferId(request_id=str(i), attempt=0)),
                    start=start,
                    token_ids=tuple((prompts[i] + [i, i])[start:end]),
                    block_ids=tuple(range(i * 4, i * 4 + 4)),
                    sample=SampleRequest(params=SamplingParams(), position=end),
                )
                for i, start, end in parts
            )
        )

    whole = [(i, 0, len(prompt)) for i, prompt in enumerate(prompts)]
    decodes = [(i, end, end + 1) for i, _, end in whole]
    with torch.inference_mode():
        for parts, replays in ((whole, 0), (decodes, 1), ([(1, 8, 9)], 2)):
            expected = ModelRunner(model, eager).logits(step(parts))
            torch.testing.assert_close(runner.logits(step(parts)), expected)
            assert recording.replays == replays
        torch.testing.assert_close(replayed.pool, eager.pool)
