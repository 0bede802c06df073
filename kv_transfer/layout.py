"""Where the KV of each head lies in a block of a worker with so many ranks, and how it moves to
one with another number of them.

A block is its ranks' parts, one behind the other. A part is [num_layers, 2, block_size, heads,
head_dim] of the rank's heads. Where there are more ranks than KV heads, several have the same one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from core.errors import Incompatible


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """One worker's blocks. Raises Incompatible where so many ranks cannot share the heads."""

    ranks: int
    num_layers: int
    block_size: int
    num_kv_heads: int  # of the model
    head_bytes: int  # of a token's key, or value, in one head

    def __post_init__(self) -> None:
        ranks, heads = self.ranks, self.num_kv_heads
        if ranks < 1 or (heads % ranks and ranks % heads):
            raise Incompatible(f"{ranks} ranks cannot share {heads} KV heads")

    @property
    def heads_per_rank(self) -> int:
        return max(1, self.num_kv_heads // self.ranks)

    def heads_of(self, rank: int) -> range:
        """The model's KV heads that a rank has, in order."""
        first = rank * self.num_kv_heads // self.ranks
        return range(first, first + self.heads_per_rank)

    def ranks_with(self, head: int) -> range:
        """The ranks that have this KV head."""
        copies = max(1, self.ranks // self.num_kv_heads)
        first = head // self.heads_per_rank * copies
        return range(first, first + copies)

    @property
    def layer_bytes(self) -> int:
        """Of one layer in a rank's part."""
        return 2 * self.block_size * self.heads_per_rank * self.head_bytes

    @property
    def rank_bytes(self) -> int:
        return self.num_layers * self.layer_bytes

    @property
    def block_bytes(self) -> int:
        return self.ranks * self.rank_bytes

    def with_ranks(self, ranks: int) -> Self:
        """The same KV shared by another number of ranks. Raises Incompatible."""
        return type(self)(
            ranks=ranks,
            num_layers=self.num_layers,
            block_size=self.block_size,
            num_kv_heads=self.num_kv_heads,
            head_bytes=self.head_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadMove:
    """Neighbouring heads that go from one rank to one rank, in all layers, keys and values."""

    source_rank: int
    source_head: int  # in the rank's part
    target_rank: int
    target_head: int
    num_heads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteRange:
    """Bytes of one block: `size` from `source` of the sender's to `target` of the receiver's."""

    source_rank: int
    target_rank: int
    source: int
    target: int
    size: int


def head_moves(sender: KvLayout, receiver: KvLayout) -> tuple[HeadMove, ...]:
    """Who sends which heads to whom: each head of each receiving rank comes from one sender.

    Of several senders that have a head, receivers take turns. Raises Incompatible where the two
    have not the same KV.
    """
    if sender.with_ranks(receiver.ranks) != receiver:
        raise Incompatible(f"blocks of {sender} and of {receiver} hold different KV")
    moves: list[HeadMove] = []
    for rank in range(receiver.ranks):
        heads = receiver.heads_of(rank)
        head = heads.start
        while head < heads.stop:
            owners = sender.ranks_with(head)
            owner = owners[rank % len(owners)]
            owned = sender.heads_of(owner)
            end = min(heads.stop, owned.stop)
            moves.append(
                HeadMove(
                    source_rank=owner,
                    source_head=head - owned.start,
                    target_rank=rank,
                    target_head=head - heads.start,
                    num_heads=end - head,
                )
            )
            head = end
    return tuple(moves)


def byte_ranges(sender: KvLayout, receiver: KvLayout) -> Iterator[ByteRange]:
    """The same in bytes of one block, as few ranges as there are, in the receiver's order."""
    for move in head_moves(sender, receiver):
        yield from _ranges_of(move, sender, receiver)


def _ranges_of(move: HeadMove, sender: KvLayout, receiver: KvLayout) -> Iterator[ByteRange]:
    source_row = sender.heads_per_rank * sender.head_bytes  # a token's heads of one rank
    target_row = receiver.heads_per_rank * receiver.head_bytes
    size = move.num_heads * sender.head_bytes
    source = move.source_rank * sender.rank_bytes + move.source_head * sender.head_bytes
    target = move.target_rank * receiver.rank_bytes + move.target_head * receiver.head_bytes
    rows = sender.num_layers * 2 * sender.block_size
    if size == source_row == target_row:  # all of both parts
        size, rows = size * rows, 1
    for row in range(rows):
        yield ByteRange(
            source_rank=move.source_rank,
            target_rank=move.target_rank,
            source=source + row * source_row,
            target=target + row * target_row,
            size=size,
        )
