"""What the next step computes: a pure function of the sequences and a budget."""

from collections.abc import Iterable
from dataclasses import dataclass

from engine.sequence import Sequence, SequenceKey

# Of the tokens that a step has for prompts, this share is for short ones that would else wait
# behind a long one. The long one keeps the rest, so neither waits without end.
SHORT_PROMPT_SHARE = 0.25
# Of a step's tokens, one part in so many is for prompts of tenants that step back, but at least so
# many: another's prompt that comes while the step is computed waits for no more than that.
BEHIND_PART = 10
BEHIND_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBudget:
    """The most that one step takes. All at least 1.

    `max_prompt_tokens` bounds what prompts get beside decoding sequences; None: `max_tokens` does.
    """

    max_tokens: int
    max_seqs: int
    max_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1 or self.max_seqs < 1 or (self.max_prompt_tokens or 1) < 1:
            raise ValueError(f"a step needs room for a token and a sequence: {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockBudget:
    """The pool: blocks that can be had now, and tokens to a block."""

    num_available: int
    block_size: int

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-tokens // self.block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledChunk:
    """Tokens [start, start + num_tokens) of a sequence; `samples` where they reach its end."""

    key: SequenceKey
    start: int
    num_tokens: int
    samples: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step. A sequence appears at most once in `items`.

    Before it, the sequences of `preempted` give their blocks back, and then those of `grown` and
    `resumed` get as many more as stand there. A resumed sequence begins with no KV; what the plan
    computes of it is the next plan's, which knows what the prefix cache still had.
    """

    items: tuple[ScheduledChunk, ...]
    preempted: tuple[SequenceKey, ...] = ()
    grown: tuple[tuple[SequenceKey, int], ...] = ()
    resumed: tuple[tuple[SequenceKey, int], ...] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.items or self.preempted or self.resumed)

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.items)


def plan_step(
    sequences: Iterable[Sequence],
    budget: StepBudget,
    blocks: BlockBudget | None = None,
    *,
    behind: frozenset[str] = frozenset(),
) -> StepPlan:
    """Chooses the chunks of the next step. `sequences` come in the order of their arrival.

    Sequences that are decoding go first, so that a long prompt delays no answer that has begun;
    prompts share what is left: a quarter for short ones, the rest first come, first served, the
    last of them in part. Prompts of the tenants in `behind` are read only in steps where nobody
    else's wait, and a little at a time. Without `blocks` every sequence has all that it needs.

    Where blocks run out, the sequence that came last gives up its own and computes its tokens again
    once there is room: those who came first always get on. A plan is empty only where no sequence
    can be computed.
    """
    waiting = list(sequences)
    supply = _Supply(waiting, blocks)
    decodes: list[Sequence] = []
    for sequence in waiting:
        if len(decodes) == min(budget.max_seqs, budget.max_tokens):
            break
        if sequence.is_decoding and supply.grow(sequence):
            decodes.append(sequence)
    decodes = [each for each in decodes if each not in supply.preempted]
    supply.resume(waiting)
    items = [
        ScheduledChunk(key=each.key, start=each.num_computed_tokens, num_tokens=1, samples=True)
        for each in decodes
    ]
    prompts = [
        each
        for each in waiting
        if not each.is_decoding and each.num_missing_tokens > 0 and supply.holds_blocks(each)
    ]
    tokens_left = budget.max_tokens - len(items)
    if budget.max_prompt_tokens is not None:
        tokens_left = min(tokens_left, budget.max_prompt_tokens)
    if behind and prompts:
        before = [each for each in prompts if each.cache_salt not in behind]
        if before:
            prompts = before
        else:
            piece = max(BEHIND_TOKENS, budget.max_tokens // BEHIND_PART)
            tokens_left = min(tokens_left, piece)
    items += _share_out(prompts[: budget.max_seqs - len(items)], tokens_left)
    return StepPlan(
        items=tuple(items),
        preempted=tuple(each.key for each in supply.preempted),
        grown=tuple((each.key, n) for each, n in supply.grown.items()),
        resumed=tuple(supply.resumed),
    )


def num_before(prompts: Iterable[Sequence], behind: frozenset[str] = frozenset()) -> int:
    """Of the prompt whose turn is next, the tokens that are computed already; 0 where none is."""
    first: Sequence | None = None
    for each in prompts:
        if each.cache_salt not in behind:
            return each.num_computed_tokens
        first = first or each
    return first.num_computed_tokens if first is not None else 0


def _share_out(prompts: list[Sequence], tokens: int) -> list[ScheduledChunk]:
    """Gives `tokens` to the prompts: the first of them, but short ones behind it as well."""
    if not prompts or tokens <= 0:
        return []
    given: dict[Sequence, int] = {}
    for_short = int(tokens * SHORT_PROMPT_SHARE)
    if prompts[0].num_missing_tokens > tokens:
        for prompt in sorted(prompts[1:], key=lambda each: each.num_missing_tokens):
            if prompt.num_missing_tokens > for_short:
                break
            given[prompt] = prompt.num_missing_tokens
            for_short -= given[prompt]
            tokens -= given[prompt]
    for prompt in prompts:
        if prompt not in given and tokens > 0:
            given[prompt] = min(prompt.num_missing_tokens, tokens)
            tokens -= given[prompt]
    return [
        ScheduledChunk(
            key=prompt.key,
            start=prompt.num_computed_tokens,
            num_tokens=given[prompt],
            samples=given[prompt] == prompt.num_missing_tokens,
        )
        for prompt in prompts
        if prompt in given
    ]


class _Supply:
    """The blocks of one plan while it is made."""

    def __init__(self, sequences: list[Sequence], blocks: BlockBudget | None) -> None:
        self._blocks = blocks
        self._left = blocks.num_available if blocks is not None else 0
        # Who can be preempted, the last to arrive at the end.
        self._victims = [
            each for each in sequences if each.may_be_preempted and not each.is_preempted
        ]
        self.preempted: list[Sequence] = []
        self.grown: dict[Sequence, int] = {}
        self.resumed: list[tuple[SequenceKey, int]] = []

    def holds_blocks(self, sequence: Sequence) -> bool:
        """Whether the sequence has its blocks in this step."""
        if self._blocks is None:
            return True
        return not sequence.is_preempted and sequence not in self.preempted

    def grow(self, sequence: Sequence) -> bool:
        """Finds the block that the next token needs, at others' cost if need be."""
        if self._blocks is None:
            return True
        if not self.holds_blocks(sequence):
            return False
        missing = self._blocks.blocks_for(len(sequence.token_ids)) - len(sequence.block_ids)
        if missing <= 0:
            return True
        while missing > self._left:
            if not self._victims:
                return False
            victim = self._victims.pop()
            self.preempted.append(victim)
            # Blocks that others share do not come free, so this is a hope; the engine looks.
            self._left += len(victim.block_ids) - victim.lease.num_shared
            self._left += self.grown.pop(victim, 0)
            if victim is sequence:
                return False
        self._left -= missing
        self.grown[sequence] = missing
        return True

    def resume(self, sequences: list[Sequence]) -> None:
        """Gives blocks to those that wait for them, in the order of arrival."""
        if self._blocks is None or self.preempted:
            return
        running = sum(1 for each in sequences if each.is_decoding and not each.is_preempted)
        for sequence in sequences:
            if not sequence.is_preempted:
                continue
            tokens = len(sequence.token_ids)
            if not sequence.may_be_preempted:
                tokens = sequence.max_kv_tokens
            needed = self._blocks.blocks_for(tokens)
            # Room for one more block of each that runs, else it would be preempted at once again.
            if needed + running > self._left and (running or needed > self._left):
                return
            self._left -= needed
            self.resumed.append((sequence.key, needed))
            running += 1
