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
from engine.logprobs import Logprobs, pieces, score
from engine.parallel.others import ALONE, OtherRanks
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
    own, so that copies on others need not wait for it, nor it for them. Where there are `others`,
    further ranks of the model, they compute every step too.
    """

    def __init__(
        self,
        model: LlamaModel,
        kv: KvCache,
        graphs: DecodeGraphs | None = None,
        others: OtherRanks = ALONE,
    ) -> None:
        self._model = model
        self._others = others
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
            scored, logits = self._computed(batch, on_layer)
            if logits is None:
                return scored
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

    def follow(self, batch: StepBatch) -> None:
        """What a rank does that is not the first: it computes, and chooses nothing.

        Of `sample` it reads whether there is one, of `score` what it covers.
        """
        with torch.inference_mode(), self._stream:
            hidden = self._prepared(batch, None)
            num_sampled = _num_sampled(batch)
            scored = hidden[num_sampled:]
            for item in batch.items:
                if item.score is not None:
                    mine, scored = _split(scored, len(item.score.token_ids))
                    for rows in pieces(mine):
                        self._model.logits(rows)
            if num_sampled:
                self._model.logits(hidden[:num_sampled])

    def logits(self, batch: StepBatch) -> Tensor:
        """The forward pass: float32 [items that sample, vocab], in the batch's order."""
        with self._others.step(batch):
            return self._model.logits(self._forward(batch)[: _num_sampled(batch)])

    def _computed(
        self, batch: StepBatch, on_layer: Callable[[int], None] | None
    ) -> tuple[tuple[ScoredPrompt, ...], Tensor | None]:
        """All that the ranks do together: what is scored, and logits where there are some."""
        num_sampled = _num_sampled(batch)
        with self._others.step(batch):
            hidden = self._prepared(batch, on_layer)
            scored = self._scored(batch, hidden[num_sampled:])
            logits = self._model.logits(hidden[:num_sampled]) if num_sampled else None
        return scored, logits

    def _prepared(self, batch: StepBatch, on_layer: Callable[[int], None] | None) -> Tensor:
        for source, target in batch.copies:
            self.kv.copy_block(source, target)
        return self._forward(batch, on_layer)

    def _scored(self, batch: StepBatch, hidden: Tensor) -> tuple[ScoredPrompt, ...]:
        """What is asked of prompts; `hidden` has their rows, one item's after another's."""
        found = []
        for item in batch.items:
            if (asked := item.score) is not None:
                mine, hidden = _split(hidden, len(asked.token_ids))
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


def _num_sampled(batch: StepBatch) -> int:
    return sum(item.sample is not None for item in batch.items)


def _split(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The first `count` rows, and the others."""
    return rows[:count], rows[count:]


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
