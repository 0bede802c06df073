"""KV between workers of different numbers of ranks: every byte of the receiver comes once, and is
the right head's."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import Incompatible
from core.messages import TransferId, TransportOffer
from kv_transfer.blocks import HostBlocks
from kv_transfer.digest import Blocks, block_digest
from kv_transfer.layout import KvLayout, byte_ranges
from kv_transfer.reshaped import blocks_for, usable_offers

TRANSFER = TransferId(request_id="r", attempt=1)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[KvLayout, KvLayout]:
    heads = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    fit = [ranks for ranks in range(1, 17) if heads % ranks == 0 or ranks % heads == 0]
    one = KvLayout(
        ranks=draw(st.sampled_from(fit)),
        num_layers=draw(st.integers(1, 3)),
        block_size=draw(st.integers(1, 4)),
        num_kv_heads=heads,
        head_bytes=draw(st.sampled_from([4, 16])),
    )
    return one, one.with_ranks(draw(st.sampled_from(fit)))


def labelled(layout: KvLayout, num_blocks: int = 1) -> Blocks:
    """A pool in which each byte tells its block, layer, half, token, head and place."""
    shape = (layout.num_layers, 2 * layout.block_size, layout.num_kv_heads, layout.head_bytes)
    size = int(np.prod(shape))
    whole = np.arange(num_blocks * size).reshape(num_blocks, *shape) * 97 % 251
    parts = [
        whole[:, :, :, layout.heads_of(rank)].reshape(num_blocks, -1)
        for rank in range(layout.ranks)
    ]
    return np.concatenate(parts, axis=1).astype(np.uint8)


@given(pairs())
@settings(deadline=None, max_examples=150)
def test_every_byte_of_the_receiver_comes_once_from_the_right_head(
    pair: tuple[KvLayout, KvLayout],
) -> None:
    ours, theirs = pair
    source, target = labelled(ours)[0], np.zeros(theirs.block_bytes, dtype=np.uint8)
    covered = np.zeros(theirs.block_bytes, dtype=int)
    for each in byte_ranges(ours, theirs):
        assert each.source_rank == each.source // ours.rank_bytes
        assert each.source_rank == (each.source + each.size - 1) // ours.rank_bytes
        assert each.target_rank == each.target // theirs.rank_bytes
        target[each.target : each.target + each.size] = source[
            each.source : each.source + each.size
        ]
        covered[each.target : each.target + each.size] += 1
    assert (covered == 1).all()
    assert np.array_equal(target, labelled(theirs)[0])


@given(pairs(), st.data())
@settings(deadline=None, max_examples=150)
def test_a_sender_gives_blocks_and_layers_as_the_receiver_has_them(
    pair: tuple[KvLayout, KvLayout], data: st.DataObject
) -> None:
    ours, theirs = pair
    pool, expected = labelled(ours, num_blocks=3), labelled(theirs, num_blocks=3)
    blocks = blocks_for(HostBlocks(pool), pool, ours, theirs)
    assert blocks.block_bytes == theirs.block_bytes
    assert np.array_equal(blocks.piece(2, 0, theirs.block_bytes, "shm"), expected[2])
    first = data.draw(st.integers(0, theirs.ranks * theirs.num_layers - 1))
    count = data.draw(st.integers(1, theirs.ranks * theirs.num_layers - first))
    start, size = first * theirs.layer_bytes, count * theirs.layer_bytes
    assert np.array_equal(blocks.piece(1, start, size, "tcp"), expected[1, start : start + size])
    assert blocks.digests(TRANSFER, 5, [0, 2], "shm") == (
        block_digest(TRANSFER, 5, expected[0]),
        block_digest(TRANSFER, 6, expected[2]),
    )


def test_blocks_that_are_alike_leave_as_they_are() -> None:
    layout = KvLayout(ranks=2, num_layers=2, block_size=2, num_kv_heads=4, head_bytes=8)
    pool = labelled(layout)
    store = HostBlocks(pool)
    assert blocks_for(store, pool, layout, layout.with_ranks(2)) is store


def test_another_layout_goes_only_by_what_copies_at_once() -> None:
    layout = KvLayout(ranks=2, num_layers=2, block_size=2, num_kv_heads=4, head_bytes=8)
    pool = labelled(layout)
    offers = [TransportOffer(name=name, address="") for name in ("nixl", "shm", "tcp")]
    alike = blocks_for(HostBlocks(pool), pool, layout, layout)
    other = blocks_for(HostBlocks(pool), pool, layout, layout.with_ranks(1))
    assert usable_offers(offers, alike) == tuple(offers)
    assert [offer.name for offer in usable_offers(offers, other)] == ["shm", "tcp"]
    with pytest.raises(Incompatible, match="what is offered is nixl"):
        usable_offers(offers[:1], other)


def test_copies_of_a_head_take_turns_in_sending() -> None:
    ours = KvLayout(ranks=4, num_layers=1, block_size=1, num_kv_heads=2, head_bytes=4)
    sources = {each.source_rank for each in byte_ranges(ours, ours.with_ranks(8))}
    assert sources == {0, 1, 2, 3}


@pytest.mark.parametrize(("heads", "ranks"), [(3, 2), (8, 3), (8, 12), (2, 0)])
def test_ranks_that_cannot_share_the_heads_are_refused(heads: int, ranks: int) -> None:
    with pytest.raises(Incompatible, match=f"{ranks} ranks cannot share {heads} KV heads"):
        KvLayout(ranks=ranks, num_layers=1, block_size=1, num_kv_heads=heads, head_bytes=4)


def test_other_kv_is_refused() -> None:
    ours = KvLayout(ranks=2, num_layers=2, block_size=2, num_kv_heads=4, head_bytes=8)
    theirs = KvLayout(ranks=2, num_layers=2, block_size=4, num_kv_heads=4, head_bytes=8)
    with pytest.raises(Incompatible, match="different KV"):
        list(byte_ranges(ours, theirs))
