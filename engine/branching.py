"""Further answers to a prompt whose KV is there: they share its blocks, copy-on-write.

A branch shares every full block of the prompt but the one with the prompt's last token. That one it
gets as a copy of its own, made on the compute thread before its first step, and computes the last
token again in it, which gives the logits that its first token is sampled from. A branch for which
no blocks can be had begins as a preempted sequence does, without any.
"""

from collections.abc import Sequence as Tokens

from engine.block_manager import OutOfBlocks
from engine.sequence import BlockCopy, Sequence, SequenceKey


def branch(parent: Sequence, choice: int, sent: Tokens[int], block_size: int) -> Sequence:
    """One more answer to the parent's prompt, of which `sent` is there already.

    The parent holds the KV of its whole prompt. The caller releases the new sequence's lease, after
    `drop_copy`.
    """
    num_prompt_tokens = parent.num_prompt_tokens
    token_ids = [*parent.token_ids[:num_prompt_tokens], *sent]
    num_shared = (num_prompt_tokens - 1) // block_size
    num_blocks = -(-(len(token_ids) + 1) // block_size)
    copy: BlockCopy | None = None
    try:
        lease = parent.lease.fork(0, num_shared, blank=num_blocks - num_shared)
    except OutOfBlocks:
        lease = parent.lease.fork(0, 0)
    else:
        copy = BlockCopy(
            source=parent.block_ids[num_shared],
            target=lease.block_ids[num_shared],
            held=parent.lease.fork(num_shared, num_shared + 1),
        )
    has_kv = copy is not None
    return Sequence(
        key=SequenceKey(parent.key.transfer, choice),
        token_ids=token_ids,
        num_prompt_tokens=num_prompt_tokens,
        num_computed_tokens=num_prompt_tokens - 1 if has_kv else 0,
        lease=lease,
        sampling=parent.sampling,
        cache_salt=parent.cache_salt,
        block_hashes=parent.block_hashes[:num_shared],
        num_published_blocks=min(num_shared, parent.num_published_blocks) if has_kv else 0,
        num_scored_tokens=num_prompt_tokens - 1,  # its parent's
        copy=copy,
    )
