"""One request as the engine computes it."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from core.messages import SamplingParams, TransferId
from engine.block_manager import BlockLease

if TYPE_CHECKING:  # the simulator plans steps as well, and starts without torch
    from engine.grammar import Matcher

# A request is preempted at most this often. After that it waits for all the blocks that it can ever
# need, and keeps them.
MAX_PREEMPTIONS = 3


@dataclass(frozen=True, slots=True)
class SequenceKey:
    """What names a sequence in its engine: one of the answers (choices) of a request's attempt."""

    transfer: TransferId
    choice: int = 0

    def __str__(self) -> str:
        return f"{self.transfer}.{self.choice}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCopy:
    """Before a sequence's first step, block `source` of the pool is copied to block `target`.

    `held` keeps the source from being given to others until then.
    """

    source: int
    target: int
    held: BlockLease = field(repr=False)


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """Tokens, the KV that is present for them, and the blocks where it lies.

    Prefill and decode are one thing here: compute what lacks KV, and sample when a step reaches
    the end of `token_ids`. A decode worker adopts a request by making a sequence whose `token_ids`
    are the prompt and the first token and whose `num_computed_tokens` is the prompt's length; a
    preempted one has lost its blocks and computes all of its tokens again.
    The event loop alone changes it.
    """

    key: SequenceKey
    # Prompt and generated tokens.
    token_ids: list[int] = field(repr=False)
    num_prompt_tokens: int
    # KV is present for token_ids[:num_computed_tokens].
    num_computed_tokens: int = 0
    # Block i holds the KV of tokens [i * block_size, (i + 1) * block_size). The request's owner
    # releases it; the engine adds blocks as the sequence grows, and vacates it to preempt.
    lease: BlockLease = field(repr=False)
    sampling: SamplingParams
    # The sequence leaves the batch after its first sampled token.
    prefill_only: bool = False
    # Who may share its blocks, and the hashes of those that are full so far.
    cache_salt: str = ""
    block_hashes: tuple[bytes, ...] = field(default=(), repr=False)
    num_published_blocks: int = 0
    num_preemptions: int = 0
    # Prompt tokens whose successor's log probability was told, where they are asked for.
    num_scored_tokens: int = 0
    # Set on a branch until its first step: see `engine.branching`.
    copy: BlockCopy | None = None
    # Where the sampling has a grammar: set by the engine once it is compiled.
    matcher: "Matcher | None" = None

    def __post_init__(self) -> None:
        if not 0 < self.num_prompt_tokens <= len(self.token_ids):
            raise ValueError(f"{self.num_prompt_tokens} prompt of {len(self.token_ids)} tokens")
        if not 0 <= self.num_computed_tokens < len(self.token_ids):
            raise ValueError(f"{self.num_computed_tokens} of {len(self.token_ids)} tokens computed")

    @property
    def block_ids(self) -> tuple[int, ...]:
        return self.lease.block_ids

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_missing_tokens(self) -> int:
        """Tokens without KV."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether all that it lacks is the KV of the token sampled last."""
        return self.num_missing_tokens == 1 and self.num_computed_tokens >= self.num_prompt_tokens

    @property
    def scores_prompt(self) -> bool:
        """Whether log probabilities of the prompt are asked for and not all told."""
        return self.sampling.prompt_logprobs and self.num_scored_tokens < self.num_prompt_tokens - 1

    @property
    def is_ready(self) -> bool:
        """Whether a step may compute it: its grammar, if it has one, is not what it waits for."""
        if self.sampling.grammar is None:
            return True
        return self.matcher is not None and not self.matcher.is_late

    @property
    def is_preempted(self) -> bool:
        """Whether it waits for blocks."""
        return not self.lease.block_ids

    @property
    def may_be_preempted(self) -> bool:
        return not self.prefill_only and self.num_preemptions < MAX_PREEMPTIONS

    def drop_copy(self) -> None:
        """The copy is done, or will not be needed."""
        if self.copy is not None:
            self.copy.held.release()
            self.copy = None

    @property
    def max_kv_tokens(self) -> int:
        """Tokens whose KV this sequence can ever hold here. The last sampled one needs none."""
        if self.prefill_only:
            return len(self.token_ids)
        return max(self.num_prompt_tokens + self.sampling.max_new_tokens - 1, len(self.token_ids))
