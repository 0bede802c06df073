"""One step as plain data: taken from the sequences on the loop, read on the compute thread."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from core.errors import TandemError
from core.messages import SamplingParams, TokenLogprobs
from engine.batching import StepPlan
from engine.grammar import Matcher
from engine.sequence import Sequence, SequenceKey


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """What the sampler needs of one sequence. The token sampled will stand at index `position`.

    The histories are empty unless a penalty reads them. `banned_token_ids` must not be sampled yet.
    `matcher`, where there is a grammar, has yet to hear of `unseen_token_ids`.
    """

    params: SamplingParams
    position: int
    choice: int = 0
    banned_token_ids: tuple[int, ...] = ()
    prompt_token_ids: tuple[int, ...] = field(default=(), repr=False)
    generated_token_ids: tuple[int, ...] = field(default=(), repr=False)
    matcher: Matcher | None = None
    unseen_token_ids: tuple[int, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """Log probabilities of prompt tokens: `token_ids[i]` is what stands behind the chunk's token
    `first + i`. `top` likeliest tokens are told with each."""

    first: int
    token_ids: tuple[int, ...] = field(repr=False)
    top: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchItem:
    """Tokens [start, start + len(token_ids)) of a sequence, and the blocks that hold its KV."""

    key: SequenceKey
    start: int
    token_ids: tuple[int, ...] = field(repr=False)
    block_ids: tuple[int, ...] = field(repr=False)
    # None where the chunk ends before the sequence does.
    sample: SampleRequest | None
    # None where no log probabilities of this chunk are asked for.
    score: ScoreRequest | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """The input of one step. `copies`, pairs of source and target block, come before all else."""

    items: tuple[BatchItem, ...]
    copies: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    """The output of one step for one sequence that reached its end."""

    key: SequenceKey
    token_id: int
    # Where they were asked for.
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRow:
    """A sequence that cannot go on, though its step was computed."""

    key: SequenceKey
    error: TandemError


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredPrompt:
    """The answer to a sequence's ScoreRequest, one for each of its tokens."""

    key: SequenceKey
    logprobs: tuple[TokenLogprobs, ...] = field(repr=False)


# Where a chunk samples and is in neither of the first two, its grammar was not ready.
StepResult = tuple[SampledToken | FailedRow | ScoredPrompt, ...]


def build_batch(
    plan: StepPlan,
    sequences: Mapping[SequenceKey, Sequence],
    eos_token_ids: Collection[int] = (),
) -> StepBatch:
    """Copies out of the sequences what the plan needs, so that no tensor code sees them."""
    items = []
    copies = []
    for chunk in plan.items:
        sequence = sequences[chunk.key]
        end = chunk.start + chunk.num_tokens
        items.append(
            BatchItem(
                key=chunk.key,
                start=chunk.start,
                token_ids=tuple(sequence.token_ids[chunk.start : end]),
                block_ids=sequence.block_ids,
                sample=_sample_request(sequence, eos_token_ids) if chunk.samples else None,
                score=_score_request(sequence, chunk.start, end),
            )
        )
        if sequence.copy is not None:
            copies.append((sequence.copy.source, sequence.copy.target))
    return StepBatch(items=tuple(items), copies=tuple(copies))


def _score_request(sequence: Sequence, start: int, end: int) -> ScoreRequest | None:
    """What of tokens [start, end) is still to be scored: not what was told before a preemption."""
    if not sequence.scores_prompt:
        return None
    first = max(start, sequence.num_scored_tokens)
    last = min(end, sequence.num_prompt_tokens - 1)
    if first >= last:
        return None
    return ScoreRequest(
        first=first - start,
        token_ids=tuple(sequence.token_ids[first + 1 : last + 1]),
        top=sequence.sampling.top_prompt_logprobs,
    )


def _sample_request(sequence: Sequence, eos_token_ids: Collection[int]) -> SampleRequest:
    params = sequence.sampling
    split = sequence.num_prompt_tokens
    repetition = params.repetition_penalty != 1.0
    generated = repetition or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    return SampleRequest(
        params=params,
        position=len(sequence.token_ids),
        choice=sequence.key.choice,
        banned_token_ids=_banned(sequence, eos_token_ids),
        prompt_token_ids=tuple(sequence.token_ids[:split]) if repetition else (),
        generated_token_ids=tuple(sequence.token_ids[split:]) if generated else (),
        matcher=sequence.matcher,
        unseen_token_ids=_unseen(sequence),
    )


def _unseen(sequence: Sequence) -> tuple[int, ...]:
    if sequence.matcher is None:
        return ()
    known = sequence.num_prompt_tokens + sequence.matcher.num_consumed
    return tuple(sequence.token_ids[known:])


def _banned(sequence: Sequence, eos_token_ids: Collection[int]) -> tuple[int, ...]:
    """What would end the answer before it has its fewest tokens."""
    params = sequence.sampling
    if sequence.num_generated_tokens >= params.min_tokens:
        return ()
    return (*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids))
