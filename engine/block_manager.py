"""Who holds which KV block of one worker's pool, and which blocks a new prompt may share.

Invariants, checked by `BlockManager.check`:

- every block is in exactly one state: free, owned, in transfer, cached or quarantined;
- the five counts sum to the pool;
- a published block (one found by its hash) is cached or owned, and only owned blocks are in more
  than one lease: published ones, and those that a fork shares.

    acquire ──> OWNED <──> IN_TRANSFER
                  │             │
                  ├──> QUARANTINED <── something may still write into the blocks
                  │             │
                  └──> RELEASED <┘      the blocks are free again, or cached if published

The event loop alone calls in here, so there is no lock.
"""

import enum
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from core.errors import Overloaded
from core.messages import BlockCounts


class OutOfBlocks(Overloaded):
    """Fewer blocks can be had than were asked for. Nothing was taken."""


class IllegalMove(RuntimeError):
    """A lease was moved or used where its state does not allow it."""


class LeaseState(enum.Enum):
    """What a lease's blocks are used for."""

    OWNED = "owned"
    IN_TRANSFER = "in_transfer"
    QUARANTINED = "quarantined"
    RELEASED = "released"


_MOVES: dict[LeaseState, frozenset[LeaseState]] = {
    LeaseState.OWNED: frozenset(
        {LeaseState.IN_TRANSFER, LeaseState.QUARANTINED, LeaseState.RELEASED}
    ),
    LeaseState.IN_TRANSFER: frozenset(
        {LeaseState.OWNED, LeaseState.QUARANTINED, LeaseState.RELEASED}
    ),
    LeaseState.QUARANTINED: frozenset({LeaseState.RELEASED}),
    LeaseState.RELEASED: frozenset(),
}


class BlockLease:
    """Blocks held by one request, from `BlockManager.acquire` until `release`.

    The first `num_shared` of `block_ids` came out of the prefix cache or were another lease's: they
    hold KV already, others may hold them too, and nobody writes to them. The lease's state is that
    of the blocks behind them. Usable as a context manager, which releases. Moves out of turn raise
    IllegalMove; `release` may be called any number of times.
    """

    __slots__ = ("_manager", "_state", "block_ids", "num_shared")

    def __init__(self, manager: "BlockManager") -> None:
        self._manager = manager
        self._state = LeaseState.OWNED
        self.block_ids: tuple[int, ...] = ()
        self.num_shared = 0

    @property
    def state(self) -> LeaseState:
        return self._state

    def take(self, n: int, prefix: Sequence[bytes] = ()) -> None:
        """Adds `n` blocks, or raises OutOfBlocks and adds none.

        An empty lease may begin with cached blocks: as many of them as `prefix` finds in a row,
        at most `n`, become its shared ones.
        """
        if self._state is not LeaseState.OWNED:
            raise IllegalMove(f"a lease that is {self._state.value} takes no blocks")
        if prefix and self.block_ids:
            raise IllegalMove("only an empty lease can begin with cached blocks")
        shared, own = self._manager._take(n, prefix)
        self.block_ids += shared + own
        self.num_shared += len(shared)

    def vacate(self) -> None:
        """Gives all blocks back and stays usable: `take` may follow."""
        if self._state is not LeaseState.OWNED:
            raise IllegalMove(f"a lease that is {self._state.value} keeps its blocks")
        block_ids, self.block_ids, self.num_shared = self.block_ids, (), 0
        self._manager._give_back(block_ids)

    def fork(self, start: int, end: int, *, blank: int = 0) -> "BlockLease":
        """A lease of its own that shares blocks `start` to `end` with this one, and `blank` more.

        Nobody may write to the shared blocks any more. Raises OutOfBlocks and takes none.
        """
        if self._state is not LeaseState.OWNED:
            raise IllegalMove(f"a block that is {self._state.value} cannot be shared")
        return self._manager._fork(self.block_ids[start:end], blank)

    def publish(self, index: int, block_hash: bytes) -> None:
        """Block `index` is full and computed: prompts that begin alike may share it from now on."""
        if self._state is not LeaseState.OWNED:
            raise IllegalMove(f"a block that is {self._state.value} cannot be shared")
        self._manager._publish(self.block_ids[index], block_hash)

    def to_transfer(self) -> None:
        """Another process reads or writes the blocks from now on."""
        self._move(LeaseState.IN_TRANSFER)

    def to_owned(self) -> None:
        """The transfer is over; this process alone uses the blocks."""
        self._move(LeaseState.OWNED)

    def quarantine(self) -> None:
        """The request is over, but a write into the blocks may still land."""
        self._move(LeaseState.QUARANTINED)

    def release(self) -> None:
        """Gives the blocks back. A released lease stays released."""
        if self._state is not LeaseState.RELEASED:
            self._move(LeaseState.RELEASED)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def _move(self, target: LeaseState) -> None:
        if target not in _MOVES[self._state]:
            raise IllegalMove(f"a lease cannot go from {self._state.value} to {target.value}")
        self._manager._moved(self, target)
        self._state = target


class BlockManager:
    """The pool of block ids `0 .. num_blocks - 1`: one acquirer, one release path.

    Cached blocks are those that were published and that nobody holds. They are given out like free
    ones when these have run out, the least recently used first.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool of {num_blocks} blocks")
        self._num_blocks = num_blocks
        # Last freed, first used: its pages are in memory already.
        self._free = deque(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()  # the least recently used first
        self._refs = [0] * num_blocks  # leases that hold the block
        self._published: dict[bytes, int] = {}
        self._hashes: dict[int, bytes] = {}  # the reverse
        self._leases: set[BlockLease] = set()
        self._held = dict.fromkeys(LeaseState, 0)
        # Published blocks that were given out as blank ones, since the start.
        self.num_evicted = 0
        # Of the blocks that were published or evicted since the last news, which are here now.
        # None: nobody has asked for news yet.
        self._news: dict[bytes, bool] | None = None
        self._on_release: list[Callable[[], None]] = []

    def on_release(self, call: Callable[[], None]) -> None:
        """Has this called whenever blocks may have come free: by each engine over the pool."""
        self._on_release.append(call)

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def num_available(self) -> int:
        """Blocks that `acquire` could give out: free and cached ones."""
        return len(self._free) + len(self._cached)

    def match(self, prefix: Sequence[bytes]) -> int:
        """How many of these hashes, from the first on, are of blocks that a prompt could share."""
        for count, block_hash in enumerate(prefix):
            if block_hash not in self._published:
                return count
        return len(prefix)

    def published(self) -> tuple[bytes, ...]:
        """The hashes of all blocks that prompts could share. `news` begins anew from here."""
        self._news = {}
        return tuple(self._published)

    def news(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """(gained, lost): what has changed since the last call of this or of `published`."""
        news, self._news = self._news or {}, {}
        gained = tuple(block_hash for block_hash, here in news.items() if here)
        return gained, tuple(block_hash for block_hash, here in news.items() if not here)

    def acquire(self, n: int, prefix: Sequence[bytes] = ()) -> BlockLease:
        """A lease of `n` blocks, or raises OutOfBlocks and takes none. See `BlockLease.take`."""
        lease = BlockLease(self)
        lease.take(n, prefix)
        self._leases.add(lease)
        return lease

    def counts(self) -> BlockCounts:
        """The pool by state."""
        return BlockCounts(
            free=len(self._free),
            owned=self._held[LeaseState.OWNED],
            in_transfer=self._held[LeaseState.IN_TRANSFER],
            cached=len(self._cached),
            quarantined=self._held[LeaseState.QUARANTINED],
        )

    def check(self) -> None:
        """Raises RuntimeError where a block was lost, is in two places or is shared wrongly."""
        refs = [0] * self._num_blocks
        held = dict.fromkeys(LeaseState, 0)
        for lease in self._leases:
            for block_id in lease.block_ids:
                refs[block_id] += 1
            own = lease.block_ids[lease.num_shared :]
            if lease.state is not LeaseState.OWNED:
                held[lease.state] += len(own)
                if any(refs[b] > 1 or b in self._hashes for b in own):
                    raise RuntimeError(f"a block that is {lease.state.value} is shared")
        held_by_any = sum(1 for count in refs if count)
        held[LeaseState.OWNED] = held_by_any - sum(held.values())
        if held != self._held:
            raise RuntimeError(f"block counts {self._held} differ from the leases' {held}")
        if refs != self._refs:
            raise RuntimeError("the reference counts differ from the leases")
        places = [*self._free, *self._cached, *(b for b, count in enumerate(refs) if count)]
        if sorted(places) != list(range(self._num_blocks)):
            raise RuntimeError(
                f"{len(places)} places hold {len(set(places))} of {self._num_blocks} blocks"
            )
        if {b: h for h, b in self._published.items()} != self._hashes:
            raise RuntimeError("the prefix cache's two tables differ")
        if set(self._free) & set(self._hashes) or not set(self._cached) <= set(self._hashes):
            raise RuntimeError("a free block is published, or a cached one is not")

    def _take(self, n: int, prefix: Sequence[bytes]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shared and the blank blocks of a lease that takes `n`."""
        if n < 0:
            raise ValueError(f"{n} blocks asked for")
        found = min(self.match(prefix), n)
        shared = tuple(self._published[block_hash] for block_hash in prefix[:found])
        blank = n - found
        available = self.num_available - sum(1 for b in shared if b in self._cached)
        if blank > available:
            raise OutOfBlocks(
                f"{n} KV blocks are needed and {available + found} of {self._num_blocks} can be had"
            )
        for block_id in shared:
            self._cached.pop(block_id, None)
            self._held[LeaseState.OWNED] += not self._refs[block_id]
            self._refs[block_id] += 1
        own = tuple(self._blank() for _ in range(blank))
        for block_id in own:
            self._refs[block_id] = 1
        self._held[LeaseState.OWNED] += blank
        return shared, own

    def _fork(self, shared: tuple[int, ...], blank: int) -> BlockLease:
        lease = self.acquire(blank)
        lease.block_ids = shared + lease.block_ids
        lease.num_shared = len(shared)
        for block_id in shared:
            self._refs[block_id] += 1
        return lease

    def _blank(self) -> int:
        if self._free:
            return self._free.popleft()
        block_id, _ = self._cached.popitem(last=False)
        block_hash = self._hashes.pop(block_id)
        del self._published[block_hash]
        self.num_evicted += 1
        if self._news is not None:
            self._news[block_hash] = False
        return block_id

    def _publish(self, block_id: int, block_hash: bytes) -> None:
        # Where two requests computed the same block at once, the first one's is found.
        if block_hash not in self._published and block_id not in self._hashes:
            self._published[block_hash] = block_id
            self._hashes[block_id] = block_hash
            if self._news is not None:
                self._news[block_hash] = True

    def _give_back(self, block_ids: tuple[int, ...]) -> None:
        # From the end: a prefix is of use without what follows it, and so is evicted later.
        num_released = 0
        for block_id in reversed(block_ids):
            self._refs[block_id] -= 1
            if self._refs[block_id]:
                continue
            num_released += 1
            if block_id in self._hashes:
                self._cached[block_id] = None
            else:
                self._free.appendleft(block_id)
        self._held[LeaseState.OWNED] -= num_released
        for call in self._on_release:
            call()

    def _moved(self, lease: BlockLease, target: LeaseState) -> None:
        own = lease.block_ids[lease.num_shared :]
        if target in (LeaseState.IN_TRANSFER, LeaseState.QUARANTINED) and any(
            block_id in self._hashes for block_id in own
        ):
            raise IllegalMove(f"blocks that others may share cannot be {target.value}")
        self._held[lease.state] -= len(own)
        self._held[LeaseState.OWNED if target is LeaseState.RELEASED else target] += len(own)
        if target is LeaseState.RELEASED:
            self._leases.remove(lease)
            self._give_back(lease.block_ids)
