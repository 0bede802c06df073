"""From logits to token ids, exactly reproducible.

A sampled token depends on its sequence's logits, parameters and position, and on nothing else:
neither on what shares its batch nor on which process samples it. The one uniform number that a
token takes comes from `engine.philox`, keyed by (seed, choice, position), and falls on the inverse
CDF of the tokens ordered by id. Not by logit: a batch of another size rounds logits otherwise, and
two near neighbours of the tail that swap places would move every token between them.

Order of work: logit bias, repetition penalty (prompt and answer), presence and frequency penalty
(answer), what must not be sampled yet (`min_tokens`), what the grammar forbids, temperature, top-k,
top-p over what top-k left, min-p. Every filter keeps the first of the tokens ordered by logit, then
by id.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.errors import Internal
from core.messages import SamplingParams
from engine.philox import uniform
from engine.step_batch import SampleRequest

# Most filters are settled by so few of the likeliest tokens; only the others sort the vocabulary.
_NUM_CANDIDATES = 256
_MIN_TEMPERATURE = 1e-30  # below this float32 has no number to divide by
_MAX_LOGIT = 1e37


def sample(
    logits: Tensor,
    requests: Sequence[SampleRequest],
    forbidden: Sequence[Tensor | None] | None = None,
) -> list[int]:
    """One token id per row. `logits` is float32 [rows, vocab]; bias and penalties change it.

    `forbidden` is for each row None or bool [vocab]: what its grammar does not allow.

    Raises Internal where a row's logits are not finite: the model or its KV is broken.
    """
    for row, request in zip(logits, requests, strict=True):
        _adjust(row, request)
    if forbidden is not None:
        for row, mask in zip(logits, forbidden, strict=True):
            if mask is not None:
                row.masked_fill_(mask, -math.inf)
    # By numpy, which takes a tenth of torch's time. NaN is the maximum of a row that has one.
    token_ids = logits.numpy().argmax(axis=-1)
    if not bool(torch.isfinite(logits[torch.arange(len(requests)), token_ids]).all()):
        raise Internal("the model's logits are not finite")
    chosen: list[int] = token_ids.tolist()
    random_rows = [i for i, each in enumerate(requests) if each.params.temperature > 0]
    if random_rows:
        params = [requests[i] for i in random_rows]
        for i, token_id in zip(random_rows, _draw(logits[random_rows], params), strict=True):
            chosen[i] = token_id
    return chosen


def _adjust(row: Tensor, request: SampleRequest) -> None:
    """Everything that changes single logits, in place."""
    if bias := request.params.logit_bias:
        row[torch.tensor([each.token_id for each in bias])] += torch.tensor(
            [each.bias for each in bias]
        )
    _penalise(row, request)
    if request.banned_token_ids:
        # Not minus infinity: where a grammar leaves nothing else, one of them it is.
        row[torch.tensor(request.banned_token_ids)] = -_MAX_LOGIT


def _penalise(row: Tensor, request: SampleRequest) -> None:
    params = request.params
    generated = request.generated_token_ids
    if params.repetition_penalty != 1.0 and (generated or request.prompt_token_ids):
        seen = torch.tensor(sorted({*request.prompt_token_ids, *generated}))
        old = row[seen].double()
        scaled = torch.where(
            old > 0, old / params.repetition_penalty, old * params.repetition_penalty
        )
        row[seen] = scaled.clamp(-_MAX_LOGIT, _MAX_LOGIT).float()
    if generated and (params.presence_penalty != 0.0 or params.frequency_penalty != 0.0):
        ids, counts = torch.tensor(generated).unique(return_counts=True)
        row[ids] -= params.presence_penalty + params.frequency_penalty * counts


def _draw(logits: Tensor, requests: Sequence[SampleRequest]) -> list[int]:
    """Inverse-CDF sampling of each row, with temperature > 0."""
    best = logits.amax(dim=-1, keepdim=True)
    temperature = torch.tensor([[max(r.params.temperature, _MIN_TEMPERATURE)] for r in requests])
    # The likeliest token weighs 1, so the sum neither overflows nor vanishes.
    weights = ((logits - best) / temperature).exp_()
    totals: list[float] = weights.sum(dim=-1, dtype=torch.float64).tolist()
    chosen = []
    for row, request in enumerate(requests):
        spot = uniform(request.params.seed, request.choice, request.position)
        if not _filters(request.params):
            chosen.append(_fall(weights[row], spot))
            continue
        kept = _kept(logits[row], weights[row], totals[row], request.params)
        chosen.append(int(kept[_fall(weights[row][kept], spot)]))
    return chosen


def _fall(weights: Tensor, spot: float) -> int:
    """The index in `weights` that `spot` in [0, 1) of their sum falls on."""
    exact = weights.double().numpy()
    sums = np.cumsum(exact)
    picked = int(np.searchsorted(sums, spot * sums[-1], side="right"))
    # Rounding may put the spot on the very end of the sum.
    return picked if picked < len(sums) else int(np.flatnonzero(exact)[-1])


def _filters(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def _kept(logits: Tensor, weights: Tensor, total: float, params: SamplingParams) -> Tensor:
    """The ids that the filters leave, ascending. `total` is the sum of all weights."""
    vocab_size = logits.shape[-1]
    top_logits, top_ids = logits.topk(min(_NUM_CANDIDATES, vocab_size))
    ordered = _candidates(top_logits, top_ids, vocab_size)
    kept = _num_kept(_weigh(weights, ordered), total, len(ordered) == vocab_size, params)
    if kept is None:
        ordered = torch.sort(logits, descending=True, stable=True).indices
        kept = _num_kept(_weigh(weights, ordered), total, True, params)
    assert kept is not None, "the whole vocabulary settles every filter"
    return ordered[:kept].sort().values


def _candidates(top_logits: Tensor, top_ids: Tensor, vocab_size: int) -> Tensor:
    """The ids of the likeliest tokens in the order of the CDF.

    `topk` breaks ties at will, so those equal to the last are left out unless they are all there.
    """
    if len(top_ids) < vocab_size:
        above = int((top_logits > top_logits[-1]).sum())
        top_logits, top_ids = top_logits[:above], top_ids[:above]
    by_id = torch.argsort(top_ids)
    by_logit = torch.argsort(top_logits[by_id], descending=True, stable=True)
    return top_ids[by_id][by_logit]


def _weigh(weights: Tensor, ordered: Tensor) -> NDArray[np.float64]:
    return weights[ordered].double().numpy()


def _num_kept(
    weights: NDArray[np.float64], total: float, whole: bool, params: SamplingParams
) -> int | None:
    """How many of `weights`, from the first on, the filters leave.

    `weights` is the beginning of the distribution, ordered by logit, whose whole sum is `total`, or
    all of it (`whole`). None where the beginning does not settle it.
    """
    if len(weights) == 0:
        return None
    sums = np.cumsum(weights)
    kept = len(weights)
    # Whether nothing that is not in `weights` can pass the filters and weigh anything.
    settled = whole or bool(sums[-1] >= total * (1 - 1e-12))
    mass = total
    if params.top_k > 0:
        if params.top_k <= kept:
            kept, settled = params.top_k, True
            mass = float(sums[kept - 1])
        elif not settled:
            return None
    if params.top_p < 1.0:
        needed = int(np.searchsorted(sums[:kept], params.top_p * mass)) + 1
        if needed <= kept:
            kept, settled = needed, True
    if params.min_p > 0.0:
        likely = int((weights[:kept] >= params.min_p * weights[0]).sum())
        if likely < kept:
            kept, settled = likely, True
    return kept if settled else None
