"""Shared blocks: found by what they hold, kept while held, the least used given up first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.block_hash import BlockHasher
from engine.block_manager import BlockLease, BlockManager, IllegalMove, LeaseState, OutOfBlocks

HASHER = BlockHasher(b"a secret of the cluster", 4)


def test_a_chain_names_full_blocks_and_all_before_them() -> None:
    chain = HASHER.chain(list(range(11)))
    assert len(chain) == 2
    assert HASHER.chain(list(range(8))) == chain
    assert HASHER.chain(list(range(12)), known=chain[:1])[:2] == chain
    other = HASHER.chain([9, 1, 2, 3, 4, 5, 6, 7])
    assert not set(other) & set(chain)


def test_salt_and_secret_keep_others_apart() -> None:
    tokens = list(range(8))
    chains = [
        HASHER.chain(tokens),
        HASHER.chain(tokens, "tenant"),
        BlockHasher(b"another secret!!", 4).chain(tokens),
    ]
    assert len({block_hash for chain in chains for block_hash in chain}) == 6


def published(manager: BlockManager, *hashes: bytes) -> BlockLease:
    lease = manager.acquire(len(hashes))
    for index, block_hash in enumerate(hashes):
        lease.publish(index, block_hash)
    return lease


def test_a_published_block_is_cached_once_nobody_holds_it_and_found_again() -> None:
    manager = BlockManager(6)
    first = published(manager, b"1", b"2")
    held = first.block_ids
    assert manager.match([b"1", b"2", b"3"]) == 2
    first.release()
    assert (manager.counts().cached, manager.counts().free) == (2, 4)
    second = manager.acquire(3, [b"1", b"2", b"3"])
    assert (second.num_shared, second.block_ids[:2]) == (2, held)
    assert (manager.counts().owned, manager.counts().cached) == (3, 0)
    manager.check()


def test_a_block_in_use_is_shared_and_counted_once() -> None:
    manager = BlockManager(4)
    first = published(manager, b"1", b"2")
    second = manager.acquire(3, [b"1", b"2"])
    assert manager.counts().owned == 3
    first.release()
    assert manager.counts().owned == 3
    manager.check()
    second.release()
    assert (manager.counts().cached, manager.counts().free) == (2, 2)


def test_the_end_of_the_least_recent_prefix_is_evicted_first() -> None:
    manager = BlockManager(4)
    published(manager, b"a1", b"a2").release()
    published(manager, b"b1", b"b2").release()
    manager.acquire(1)
    assert (manager.match([b"a1", b"a2"]), manager.match([b"b1", b"b2"])) == (1, 2)
    assert manager.num_evicted == 1
    manager.check()


def test_a_lease_that_cannot_be_had_takes_nothing_from_the_cache() -> None:
    manager = BlockManager(3)
    published(manager, b"1").release()
    manager.acquire(1)
    with pytest.raises(OutOfBlocks):
        manager.acquire(4, [b"1"])
    assert manager.counts().cached == 1
    manager.check()


def test_only_own_unpublished_blocks_go_into_a_transfer() -> None:
    manager = BlockManager(4)
    published(manager, b"1").release()
    lease = manager.acquire(3, [b"1"])
    lease.to_transfer()
    assert (manager.counts().owned, manager.counts().in_transfer) == (1, 2)
    with pytest.raises(IllegalMove):
        lease.publish(1, b"2")
    lease.quarantine()
    assert (manager.counts().owned, manager.counts().quarantined) == (1, 2)
    manager.check()
    lease.release()
    other = published(manager, b"3")
    with pytest.raises(IllegalMove):
        other.to_transfer()


def test_a_vacated_lease_can_be_filled_again_and_a_released_one_cannot() -> None:
    manager = BlockManager(4)
    lease = published(manager, b"1", b"2")
    lease.vacate()
    assert lease.block_ids == ()
    lease.take(3, [b"1", b"2"])
    assert lease.num_shared == 2
    with pytest.raises(IllegalMove):
        lease.take(1, [b"1"])
    lease.release()
    for use in (lease.vacate, lambda: lease.take(1), lambda: lease.publish(0, b"9")):
        with pytest.raises(IllegalMove):
            use()


ACTIONS = st.tuples(
    st.integers(0, 6),
    st.sampled_from(["take", "publish", "vacate", "to_transfer", "to_owned", "quarantine"]),
    st.lists(st.sampled_from([b"1", b"2", b"3", b"4", b"5"]), max_size=4),
)


@given(st.integers(1, 16), st.lists(ACTIONS, max_size=60))
def test_any_history_conserves_the_pool(
    num_blocks: int, actions: list[tuple[int, str, list[bytes]]]
) -> None:
    manager = BlockManager(num_blocks)
    leases: list[BlockLease] = []
    for which, action, hashes in actions:
        try:
            if which >= len(leases):
                leases.append(manager.acquire(len(hashes) + 1, hashes))
            elif action == "take":
                leases[which].take(len(hashes))
            elif action == "publish":
                for index, block_hash in enumerate(hashes[: len(leases[which].block_ids)]):
                    leases[which].publish(index, block_hash)
            else:
                getattr(leases[which], action)()
        except (OutOfBlocks, IllegalMove):
            pass
        manager.check()
        assert manager.counts().total == num_blocks
    for lease in leases:
        lease.release()
    manager.check()
    assert manager.num_available == num_blocks
    assert all(lease.state is LeaseState.RELEASED for lease in leases)
