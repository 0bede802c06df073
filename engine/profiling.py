"""How much memory a worker's largest step takes on its GPU, found by computing one."""

from dataclasses import replace

import torch

from core.messages import SamplingParams, TransferId
from engine.kv_cache import KvCache, KvSpec
from engine.llama import LlamaModel
from engine.runner import ModelRunner
from engine.sequence import SequenceKey
from engine.step_batch import BatchItem, SampleRequest, StepBatch

# For captured graphs, the kernels' own code and memory that the allocator cannot use.
RESERVE_BYTES = 3 * 2**28


def peak_bytes(model: LlamaModel, one: KvSpec, *, num_tokens: int, max_seqs: int) -> int:
    """Weights, the activations of a step of `num_tokens` and `max_seqs` samples, and a reserve.

    `one` is the pool's shape for one block. Computes a step over a pool of its own, and frees it.
    """
    device = model.device
    num_blocks = -(-num_tokens // one.block_size)
    kv = KvCache(replace(one, num_blocks=num_blocks), device=device)
    torch.cuda.reset_peak_memory_stats(device)
    batch = largest_step(num_tokens=num_tokens, max_seqs=max_seqs, num_blocks=num_blocks)
    with torch.inference_mode():
        ModelRunner(model, kv).logits(batch)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - kv.spec.kv_bytes
    del kv
    torch.cuda.empty_cache()
    return peak + RESERVE_BYTES


def largest_step(*, num_tokens: int, max_seqs: int, num_blocks: int) -> StepBatch:
    """As many tokens and as many samples as a step may have.

    They all lie in the same blocks: nobody reads what comes of it.
    """
    seqs = min(max_seqs, num_tokens)
    shares = [num_tokens // seqs + (i < num_tokens % seqs) for i in range(seqs)]
    sampling = SamplingParams(temperature=0.0)
    items = tuple(
        BatchItem(
            key=SequenceKey(TransferId(request_id=f"profile {i}", attempt=0)),
            start=0,
            token_ids=(0,) * share,
            block_ids=tuple(range(num_blocks)),
            sample=SampleRequest(params=sampling, position=share),
        )
        for i, share in enumerate(shares)
    )
    return StepBatch(items=items)
