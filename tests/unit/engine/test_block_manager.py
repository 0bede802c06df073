"""Blocks are conserved whatever a lease goes through."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import Overloaded
from core.messages import BlockCounts
from engine.block_manager import BlockLease, BlockManager, IllegalMove, LeaseState, OutOfBlocks

MOVES = ("to_transfer", "to_owned", "quarantine", "release")


def test_a_lease_moves_through_the_counts() -> None:
    manager = BlockManager(10)
    lease = manager.acquire(3)
    assert manager.counts() == BlockCounts(free=7, owned=3)
    lease.to_transfer()
    assert manager.counts() == BlockCounts(free=7, in_transfer=3)
    lease.quarantine()
    assert manager.counts() == BlockCounts(free=7, quarantined=3)
    lease.release()
    assert manager.counts() == BlockCounts(free=10)


def test_a_lease_taken_back_from_a_transfer_is_owned() -> None:
    lease = BlockManager(2).acquire(1)
    lease.to_transfer()
    lease.to_owned()
    assert lease.state is LeaseState.OWNED


def test_too_many_blocks_are_refused_whole() -> None:
    manager = BlockManager(4)
    manager.acquire(3)
    with pytest.raises(OutOfBlocks) as caught:
        manager.acquire(2)
    assert isinstance(caught.value, Overloaded)
    assert manager.counts() == BlockCounts(free=1, owned=3)


def test_release_is_idempotent_and_frees_once() -> None:
    manager = BlockManager(4)
    first = manager.acquire(2)
    first.release()
    second = manager.acquire(4)
    first.release()
    assert manager.counts() == BlockCounts(free=0, owned=4)
    second.release()
    manager.check()


def test_leaving_the_context_releases_also_on_an_error() -> None:
    manager = BlockManager(4)
    with pytest.raises(KeyError), manager.acquire(2):
        raise KeyError
    assert manager.num_available == 4


@pytest.mark.parametrize("move", ["to_transfer", "to_owned", "quarantine"])
def test_a_released_lease_cannot_move(move: str) -> None:
    lease = BlockManager(1).acquire(1)
    lease.release()
    with pytest.raises(IllegalMove):
        getattr(lease, move)()


@pytest.mark.parametrize("move", ["to_transfer", "to_owned"])
def test_quarantined_blocks_are_not_used_again_before_release(move: str) -> None:
    lease = BlockManager(1).acquire(1)
    lease.quarantine()
    with pytest.raises(IllegalMove):
        getattr(lease, move)()


def test_check_notices_a_lost_and_a_doubled_block() -> None:
    lost = BlockManager(3)
    lost._free.pop()
    with pytest.raises(RuntimeError):
        lost.check()
    doubled = BlockManager(3)
    doubled.acquire(1)
    doubled._free.append(0)
    with pytest.raises(RuntimeError):
        doubled.check()


@given(
    st.integers(1, 24),
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from(MOVES), st.integers(0, 7)), max_size=60),
)
def test_any_history_conserves_the_pool(num_blocks: int, steps: list[tuple[int, str, int]]) -> None:
    manager = BlockManager(num_blocks)
    leases: list[BlockLease] = []
    for which, move, size in steps:
        if which >= len(leases):
            if size <= manager.num_available:
                leases.append(manager.acquire(size))
            else:
                with pytest.raises(OutOfBlocks):
                    manager.acquire(size)
        else:
            before = leases[which].state
            try:
                getattr(leases[which], move)()
            except IllegalMove:
                assert leases[which].state is before
        manager.check()
        assert manager.counts().total == num_blocks
        held = [
            b for each in leases if each.state is not LeaseState.RELEASED for b in each.block_ids
        ]
        assert len(set(held)) == len(held) == num_blocks - manager.num_available


def test_a_fork_shares_blocks_until_the_last_of_those_that_hold_them_lets_go() -> None:
    manager = BlockManager(8)
    first = manager.acquire(3)
    fork = first.fork(0, 2, blank=2)
    assert fork.block_ids[:2] == first.block_ids[:2]
    assert (fork.num_shared, len(fork.block_ids)) == (2, 4)
    assert manager.counts().owned == 5
    manager.check()
    first.release()
    assert manager.counts().owned == 4
    manager.check()
    fork.vacate()
    fork.release()
    assert manager.counts().free == 8
    manager.check()


def test_a_fork_that_finds_no_room_takes_nothing() -> None:
    manager = BlockManager(4)
    first = manager.acquire(3)
    with pytest.raises(OutOfBlocks):
        first.fork(0, 3, blank=2)
    manager.check()
    first.release()
    assert manager.counts().free == 4


def test_blocks_in_transfer_are_not_shared() -> None:
    manager = BlockManager(4)
    first = manager.acquire(3)
    first.to_transfer()
    with pytest.raises(IllegalMove):
        first.fork(0, 1)


def test_news_tell_what_the_prefix_cache_gained_and_lost_and_nothing_twice():
    blocks = BlockManager(2)
    with blocks.acquire(1) as lease:
        lease.publish(0, b"a")
    assert blocks.published() == (b"a",)
    assert blocks.news() == ((), ())
    with blocks.acquire(2) as lease:  # the cached one had to go
        lease.publish(0, b"b")
        assert blocks.news() == ((b"b",), (b"a",))
    assert blocks.news() == ((), ())
    assert blocks.published() == (b"b",)


def test_a_block_that_came_and_went_between_two_news_is_told_as_gone():
    blocks = BlockManager(1)
    blocks.published()
    with blocks.acquire(1) as lease:
        lease.publish(0, b"a")
    blocks.acquire(1).release()
    assert blocks.news() == ((), (b"a",))
