"""Which worker holds which prompt blocks: what the workers report, and what was just placed.

Workers tell what their prefix caches gain and lose (`CacheNews`), so this is the truth as of their
last report. Until the next one, what was placed on a worker is taken to be there: requests that
begin alike often come within one report of each other.
"""

from collections import deque
from collections.abc import Sequence

from core.messages import CacheNews

# What was placed and never reported is forgotten after so long: cancelled, or too short to share.
_HOPE_S = 30.0


class PrefixIndex:
    """One table for all workers: a block's short hash to a bit for each worker that holds it.

    A prompt's chain is followed once for all workers together, so that finding who holds most of it
    costs the blocks that are found and not the number of workers.
    """

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        self._bits: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._reported: dict[str, set[int]] = {}
        # (when, worker's bit, its name, blocks), the oldest first.
        self._hoped: deque[tuple[float, str, tuple[int, ...]]] = deque()

    def __len__(self) -> int:
        return len(self._holders)

    def join(self, worker: str) -> None:
        """A worker that holds nothing yet. One that is known begins anew."""
        self.leave(worker)
        bit = 1
        while bit in self._names:
            bit <<= 1
        self._bits[worker], self._names[bit] = bit, worker
        self._reported[worker] = set()

    def leave(self, worker: str) -> None:
        """The worker and all it held is gone. Idempotent."""
        bit = self._bits.pop(worker, None)
        if bit is None:
            return
        del self._names[bit], self._reported[worker]
        for block_hash in [key for key, holders in self._holders.items() if holders & bit]:
            self._drop(block_hash, bit)

    def report(self, worker: str, news: CacheNews) -> None:
        """What a worker's cache has gained and lost."""
        bit = self._bits.get(worker)
        if bit is None:
            return
        held = self._reported[worker]
        if news.whole:
            for block_hash in held.difference(news.published):
                self._drop(block_hash, bit)
            held.clear()
        for block_hash in news.evicted:
            held.discard(block_hash)
            self._drop(block_hash, bit)
        for block_hash in news.published:
            held.add(block_hash)
            self._holders[block_hash] = self._holders.get(block_hash, 0) | bit

    def hope(self, worker: str, block_hashes: tuple[int, ...], *, now_s: float) -> None:
        """A prompt was placed on the worker, which will hold its blocks."""
        bit = self._bits.get(worker)
        if bit is None or not block_hashes:
            return
        self._hoped.append((now_s, worker, block_hashes))
        for block_hash in block_hashes:
            self._holders[block_hash] = self._holders.get(block_hash, 0) | bit

    def forget(self, *, now_s: float) -> None:
        """Drops what was hoped for and has not been reported in time."""
        while self._hoped and self._hoped[0][0] + _HOPE_S <= now_s:
            _, worker, block_hashes = self._hoped.popleft()
            bit = self._bits.get(worker)
            if bit is None:
                continue
            held = self._reported[worker]
            for block_hash in block_hashes:
                if block_hash not in held:
                    self._drop(block_hash, bit)

    def match(self, block_hashes: Sequence[int]) -> dict[str, int]:
        """By worker, how many of these blocks it holds in a row from the first; none: left out."""
        left = -1  # everybody
        found: dict[str, int] = {}
        for count, block_hash in enumerate(block_hashes):
            still = self._holders.get(block_hash, 0) & left
            if count and still != left:
                self._note(found, left & ~still, count)
            left = still
            if not left:
                return found
        if block_hashes:
            self._note(found, left, len(block_hashes))
        return found

    def _note(self, found: dict[str, int], bits: int, count: int) -> None:
        while bits:
            bit = bits & -bits
            found[self._names[bit]] = count
            bits ^= bit

    def _drop(self, block_hash: int, bit: int) -> None:
        holders = self._holders.get(block_hash, 0) & ~bit
        if holders:
            self._holders[block_hash] = holders
        else:
            self._holders.pop(block_hash, None)
