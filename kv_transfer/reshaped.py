"""A sender's blocks as a receiver with another number of ranks wants them."""

from collections.abc import Iterable, Sequence

import numpy as np

from core.errors import Incompatible
from core.messages import TransferId, TransportOffer
from kv_transfer.blocks import BlockStore
from kv_transfer.digest import Blocks, block_digest
from kv_transfer.layout import HeadMove, KvLayout, head_moves

# Transports that take bytes from memory of any place and lifetime.
COPY_AT_ONCE = frozenset({"shm", "tcp", "collective"})


class ReshapedBlocks:
    """The pool in host memory, uint8 [num_blocks, block_bytes], in the receiver's layout.

    Every piece is a copy, made when it is asked for. It begins and ends with a layer of one of the
    receiver's ranks. For transports in `COPY_AT_ONCE`. Raises Incompatible where the two layouts
    hold different KV.
    """

    def __init__(self, pool: Blocks, ours: KvLayout, theirs: KvLayout) -> None:
        self._theirs = theirs
        self._moves = head_moves(ours, theirs)
        self._pool = pool.reshape(
            *(len(pool), ours.ranks, ours.num_layers, 2 * ours.block_size),
            *(ours.heads_per_rank, ours.head_bytes),
        )
        self.block_bytes = theirs.block_bytes

    def piece(self, block_id: int, start: int, size: int, transport: str) -> Blocks:
        theirs = self._theirs
        first, end = start // theirs.layer_bytes, (start + size) // theirs.layer_bytes
        if start % theirs.layer_bytes or size % theirs.layer_bytes:
            raise ValueError(f"bytes {start} to {start + size} are no whole layers")
        made = np.empty(
            (end - first, 2 * theirs.block_size, theirs.heads_per_rank, theirs.head_bytes),
            dtype=np.uint8,
        )
        for move in self._moves:
            # The layers of the receiver's rank that the piece has, counted over its whole block.
            begin = move.target_rank * theirs.num_layers
            low, high = max(first, begin), min(end, begin + theirs.num_layers)
            if low < high:
                self._fill(made[low - first : high - first], block_id, move, low - begin)
        return made.reshape(-1)

    def _fill(self, made: Blocks, block_id: int, move: HeadMove, layer: int) -> None:
        """`made` is uint8 [layers, 2 * block_size, heads, head_bytes], from `layer` on."""
        sources = slice(move.source_head, move.source_head + move.num_heads)
        targets = slice(move.target_head, move.target_head + move.num_heads)
        part = self._pool[block_id, move.source_rank, layer : layer + len(made), :, sources]
        made[:, :, targets] = part

    def digests(
        self, transfer: TransferId, first_index: int, block_ids: Iterable[int], transport: str
    ) -> tuple[int, ...]:
        return tuple(
            block_digest(transfer, index, self.piece(block_id, 0, self.block_bytes, transport))
            for index, block_id in enumerate(block_ids, first_index)
        )

    def landed(self, block_ids: Iterable[int], transport: str) -> None:
        raise NotImplementedError("blocks are sent in another layout, and never received in one")


def usable_offers(
    offers: Sequence[TransportOffer], blocks: BlockStore
) -> tuple[TransportOffer, ...]:
    """The offers by which such blocks can go. Raises Incompatible where there is none."""
    if not isinstance(blocks, ReshapedBlocks):
        return tuple(offers)
    usable = tuple(offer for offer in offers if offer.name in COPY_AT_ONCE)
    if not usable:
        names = ", ".join(offer.name for offer in offers)
        raise Incompatible(
            f"workers of different numbers of ranks hand over by {', '.join(sorted(COPY_AT_ONCE))},"
            f" and what is offered is {names or 'nothing'}"
        )
    return usable


def blocks_for(store: BlockStore, pool: Blocks, ours: KvLayout, theirs: KvLayout) -> BlockStore:
    """`store` itself for a peer whose blocks are alike. Raises Incompatible."""
    return store if ours == theirs else ReshapedBlocks(pool, ours, theirs)
