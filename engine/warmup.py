"""The first steps of a worker: nobody waits for them, and they tell what steps cost here."""

import time
from dataclasses import dataclass

from core.messages import SamplingParams, TransferId
from engine.block_manager import BlockManager
from engine.runner import ModelRunner
from engine.sequence import SequenceKey
from engine.step_batch import BatchItem, SampleRequest, StepBatch

_NUM_PROMPT_TOKENS = 64
_NUM_DECODES = (1, 4)
_ROUNDS = 3  # the first one pays for what is made once: kernels, buffers, pages
_SAMPLING = SamplingParams(temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """What one step computed, and how long it took."""

    num_decodes: int
    num_prompt_tokens: int
    compute_s: float


def warm_up(
    runner: ModelRunner, blocks: BlockManager, *, block_size: int, window: int
) -> tuple[StepTime, ...]:
    """Computes some steps over blocks that are free again afterwards; gives the last round's times.

    Runs on the compute thread, before the engine does. A pool or a window that is too small for the
    usual lengths is warmed up with shorter ones.
    """
    most = min(window - 1, blocks.num_available // max(_NUM_DECODES) * block_size - 1)
    length = min(_NUM_PROMPT_TOKENS, most)
    if length < 1:
        return ()
    times: list[StepTime] = []
    per_sequence = -(-(length + 1) // block_size)
    with blocks.acquire(per_sequence * max(_NUM_DECODES)) as lease:
        rows = [
            lease.block_ids[row * per_sequence : (row + 1) * per_sequence]
            for row in range(max(_NUM_DECODES))
        ]
        for _ in range(_ROUNDS):
            times = [
                _timed(runner, [_item(row, 0, length, held)], 0) for row, held in enumerate(rows)
            ]
            for count in _NUM_DECODES:
                decodes = [_item(row, length, 1, held) for row, held in enumerate(rows[:count])]
                times.append(_timed(runner, decodes, count))
    return tuple(times)


def _item(row: int, start: int, num_tokens: int, block_ids: tuple[int, ...]) -> BatchItem:
    return BatchItem(
        key=SequenceKey(TransferId(request_id=f"warm-up {row}", attempt=0)),
        start=start,
        token_ids=(0,) * num_tokens,
        block_ids=block_ids,
        sample=SampleRequest(params=_SAMPLING, position=start + num_tokens),
    )


def _timed(runner: ModelRunner, items: list[BatchItem], num_decodes: int) -> StepTime:
    begin_s = time.perf_counter()
    runner.execute(StepBatch(items=tuple(items)))
    return StepTime(
        num_decodes=num_decodes,
        num_prompt_tokens=0 if num_decodes else sum(len(item.token_ids) for item in items),
        compute_s=time.perf_counter() - begin_s,
    )
