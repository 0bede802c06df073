"""Log probabilities of tokens, sampled or of a prompt, and of the likeliest, for those who asked.

They are of the model's own distribution: the log-softmax of the raw logits in float32, before bias,
penalties, temperature and filters. Rows that do not ask cost nothing.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from core.messages import TokenLogprobs
from engine.step_batch import SampleRequest, ScoreRequest

# Logits of so many prompt tokens exist at once: a long prompt's would be gigabytes.
_ROWS_AT_ONCE = 32


class Logprobs:
    """Of one step: made before the sampler changes the logits, read once the tokens are known.

    `logits` is float32 [rows, vocab], a row for each request.
    """

    def __init__(self, logits: Tensor, requests: Sequence[SampleRequest]) -> None:
        self._requests = requests
        self._rows = [i for i, each in enumerate(requests) if each.params.logprobs]
        # [rows that ask, vocab]
        self._values = logits[self._rows].log_softmax(dim=-1) if self._rows else None

    def of(self, token_ids: Sequence[int]) -> list[TokenLogprobs | None]:
        """Those of each row's token; None for rows that do not ask."""
        found: list[TokenLogprobs | None] = [None] * len(token_ids)
        if self._values is not None:
            for row, values in zip(self._rows, self._values, strict=True):
                count = self._requests[row].params.top_logprobs
                found[row] = _of(values, token_ids[row], count)
        return found


def pieces(hidden: Tensor) -> tuple[Tensor, ...]:
    """Rows whose logits are made at once."""
    found: tuple[Tensor, ...] = hidden.split(_ROWS_AT_ONCE)
    return found


def score(
    hidden: Tensor, asked: ScoreRequest, logits: Callable[[Tensor], Tensor]
) -> tuple[TokenLogprobs, ...]:
    """Log probabilities of prompt tokens. `hidden` is [tokens, hidden], one row before each."""
    found: list[TokenLogprobs] = []
    for rows in pieces(hidden):
        values = logits(rows).log_softmax(dim=-1)
        for row in values:
            found.append(_of(row, asked.token_ids[len(found)], asked.top))
    return tuple(found)


def _of(values: Tensor, token_id: int, count: int) -> TokenLogprobs:
    ids: list[int] = []
    if count > 0:
        top = values.topk(min(count, len(values)))
        # topk breaks ties at will; those at its edge it also chooses at will.
        ordered = sorted(zip((-top.values).tolist(), top.indices.tolist(), strict=True))
        ids = [each for _, each in ordered]
    logprobs = values[[token_id, *ids]].tolist()
    return TokenLogprobs(
        logprob=logprobs[0], top_token_ids=tuple(ids), top_logprobs=tuple(logprobs[1:])
    )
