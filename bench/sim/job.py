"""One sequence on one simulated worker."""

from dataclasses import dataclass, field

from core.messages import SamplingParams, TransferId
from engine.block_manager import BlockLease
from engine.sequence import Sequence, SequenceKey


class TokenCount(list[int]):
    """Tokens of which nobody asks more than how many they are."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def __len__(self) -> int:
        return self.number


@dataclass(slots=True, eq=False)
class Job:
    """A sequence of the engine's own kind, and when it ends.

    While it decodes in a batch its sequence stands still; `DecodeBatch.leave` brings it up to date.
    """

    sequence: Sequence
    tokens: TokenCount
    # Tokens in all, prompt and answer, at which it is over.
    end_tokens: int
    # What its owner knows it by.
    tag: object = None
    # Times of tokens that nobody was told of yet.
    times_s: list[float] = field(default_factory=list)
    # The batch's step before which it joined, and its tokens then; -1: it is in no batch.
    joined_step: int = -1
    joined_tokens: int = 0

    @property
    def key(self) -> SequenceKey:
        return self.sequence.key

    @property
    def is_over(self) -> bool:
        return self.tokens.number >= self.end_tokens


def make_job(
    transfer: TransferId,
    lease: BlockLease,
    *,
    prompt_tokens: int,
    known_tokens: int,
    computed_tokens: int,
    end_tokens: int,
    prefill_only: bool = False,
    hashes: tuple[bytes, ...] = (),
    num_published: int = 0,
    tenant: str = "",
    tag: object = None,
) -> Job:
    """A job with its sequence. `known_tokens` are the prompt's and those that were generated."""
    tokens = TokenCount(known_tokens)
    sequence = Sequence(
        key=SequenceKey(transfer),
        token_ids=tokens,
        num_prompt_tokens=prompt_tokens,
        num_computed_tokens=computed_tokens,
        lease=lease,
        sampling=SamplingParams(max_new_tokens=max(1, end_tokens - prompt_tokens)),
        prefill_only=prefill_only,
        cache_salt=tenant,
        block_hashes=hashes,
        num_published_blocks=num_published,
    )
    return Job(sequence=sequence, tokens=tokens, end_tokens=end_tokens, tag=tag)
