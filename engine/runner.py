"""One step's tensor work: tokens in, sampled tokens out. Lives on the compute thread."""

import contextlib
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from core.errors import Internal
from core.messages import TokenLogprobs
from engine.attention import AttentionRow
from engine.decode_tensors import to_device
from engine.grammar import Masks
from engine.graphs import DecodeGraphs
from engine.kv_cache import KvCache
from engine.llama import LlamaModel, StepTokens
from engine.logprobs import Logprobs, score
from engine.sampler import sample
from engine.step_batch import (
    FailedRow,
    SampledToken,
    SampleRequest,
    ScoredPrompt,
    StepBatch,
    StepResult,
)


class ModelRunner:
    """A model and the KV pool that it reads and writes.

    With `graphs` they compute the steps that they can. On a GPU everything is on a stream of its
    own, so that copies on others need not wait for it, nor it for them.
    """

    def __init__(self, model: LlamaModel, kv: KvCache, graphs: DecodeGraphs | None = None) -> None:
        self._model = model
        self.kv = kv
        self.graphs = graphs
        self._device = kv.pool.device
        self._stream: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if self._device.type == "cuda":
            self._stream = torch.cuda.stream(torch.cuda.Stream(self._device))

    @property
    def block_size(self) -> int:
        return self.kv.spec.block_size

    def execute(
        self, batch: StepBatch, on_layer: Callable[[int], None] | None = None
    ) -> StepResult:
        """Computes the KV of every token of the batch and samples for the items that ask for it.

        `on_layer` is called on this thread with the index of each layer whose KV is in the pool.
        """
        keys = [item.key for item in batch.items if item.sample is not None]
        requests = [item.sample for item in batch.items if item.sample is not None]
        masks = Masks(requests)
        with torch.inference_mode(), self._stream:
            for source, target in batch.copies:
                self.kv.copy_block(source, target)
            hidden = self._forward(batch, on_layer)
            scored = self._scored(batch, hidden[len(keys) :])
            if not keys:
                return scored
            logits = self._model.logits(hidden[: len(keys)])
            rows = masks.collect()
            if len(rows) < len(keys):
                logits, requests = logits[rows], [requests[i] for i in rows]
            if logits.device.type != "cpu" and all(map(_is_plain, requests)):
                token_ids = _likeliest(logits)
                logprobs: list[TokenLogprobs | None] = [None] * len(requests)
            else:
                logits = logits.cpu()
                asked = Logprobs(logits, requests)
                token_ids = sample(logits, requests, masks.forbidden(rows)) if rows else []
                logprobs = asked.of(token_ids)
        failed = (FailedRow(key=keys[i], error=error) for i, error in masks.failures.items())
        sampled = (
            SampledToken(key=keys[i], token_id=token_id, logprobs=found)
            for i, token_id, found in zip(rows, token_ids, logprobs, strict=True)
        )
        return (*scored, *sampled, *failed)

    def logits(self, batch: StepBatch) -> Tensor:
        """The forward pass: float32 [items that sample, vocab], in the batch's order."""
        num_sampled = sum(item.sample is not None for item in batch.items)
        return self._model.logits(self._forward(batch)[:num_sampled])

    def _scored(self, batch: StepBatch, hidden: Tensor) -> tuple[ScoredPrompt, ...]:
        """What is asked of prompts; `hidden` has their rows, one item's after another's."""
        found = []
        for item in batch.items:
            if (asked := item.score) is not None:
                mine, hidden = hidden.split(
                    (len(asked.token_ids), len(hidden) - len(asked.token_ids))
                )
                found.append(
                    ScoredPrompt(key=item.key, logprobs=score(mine, asked, self._model.logits))
                )
        return tuple(found)

    def _forward(self, batch: StepBatch, on_layer: Callable[[int], None] | None = None) -> Tensor:
        """Hidden states of the tokens that are sampled behind, then of those that are scored."""
        token_ids: list[int] = []
        positions: list[int] = []
        sample_rows: list[int] = []
        score_rows: list[int] = []
        rows: list[AttentionRow] = []
        for item in batch.items:
            count = len(item.token_ids)
            if item.score is not None:
                first = len(token_ids) + item.score.first
                score_rows.extend(range(first, first + len(item.score.token_ids)))
            token_ids.extend(item.token_ids)
            positions.extend(range(item.start, item.start + count))
            rows.append(AttentionRow(start=item.start, num_tokens=count, block_ids=item.block_ids))
            if item.sample is not None:
                sample_rows.append(len(token_ids) - 1)
        sampled_alone = len(sample_rows) == len(rows) and not score_rows
        if self.graphs is not None and on_layer is None and sampled_alone:
            size = self.graphs.bucket(rows)
            if size is not None:
                return self.graphs.run(rows, token_ids, size)
        step = StepTokens(
            token_ids=self._int64(token_ids),
            positions=self._int64(positions),
            rows=tuple(rows),
            sample_rows=self._int64(sample_rows + score_rows),
        )
        return self._model.forward(step, self.kv, self._marking(on_layer))

    def _int64(self, values: list[int]) -> Tensor:
        return to_device(np.array(values, dtype=np.int64), self._device)

    def _marking(self, on_layer: Callable[[int], None] | None) -> Callable[[int], None] | None:
        """On a GPU a layer is told of when it is launched; who needs its KV waits for the mark."""
        if on_layer is None or self._device.type == "cpu":
            return on_layer

        def marked(layer: int) -> None:
            self.kv.mark_written()
            on_layer(layer)

        return marked


def _is_plain(request: SampleRequest) -> bool:
    """Whether the likeliest token is all that is wanted of its logits, as they are."""
    params = request.params
    return (
        params.temperature == 0.0
        and not params.logprobs
        and not params.logit_bias
        and not request.banned_token_ids
        and request.matcher is None
        and params.repetition_penalty == 1.0
        and params.presence_penalty == 0.0
        and params.frequency_penalty == 0.0
    )


def _likeliest(logits: Tensor) -> list[int]:
    """By the device, so that a number and not a vocabulary of them crosses to the host per row."""
    best, token_ids = logits.max(dim=-1)
    if not bool(torch.isfinite(best).all()):
        raise Internal("the model's logits are not finite")
    chosen: list[int] = token_ids.tolist()
    return chosen
