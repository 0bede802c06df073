"""Some consecutive blocks of one transfer on their way to a peer."""

import time
from collections.abc import Sequence

from core.errors import TandemError
from core.messages import TransferId
from kv_transfer.blocks import BlockStore
from kv_transfer.cost import PushCost
from kv_transfer.layout import KvLayout
from kv_transfer.transport import BlockSender

_FLUSH_TIMEOUT_S = 10.0


class Push:
    """Whole blocks after they are computed, or layer by layer while they are.

    `write_layer` and `finish` run on the peer's thread, in the order in which they were queued.
    Blocks are uint8 [block_bytes] of the receiver's layout.
    """

    def __init__(
        self,
        transfer: TransferId,
        blocks: BlockStore,
        first_index: int,
        sources: Sequence[int],
        targets: Sequence[int],
        layout: KvLayout,
    ) -> None:
        self._transfer = transfer
        self._blocks = blocks
        self._first_index = first_index
        self._pairs = tuple(zip(sources, targets, strict=True))
        self._layout = layout
        self._pieces = 0
        # Seconds spent writing so far; read by others once `finish` has returned.
        self.written_s = 0.0
        self._dropped = False
        self._error: TandemError | None = None
        # Set before the step that computes the blocks: its layers are pushed one by one.
        self.by_layer = False

    def drop(self) -> None:
        """Nothing further is written. The piece in progress is finished."""
        self._dropped = True

    def write_layer(self, sender: BlockSender, layer: int) -> None:
        """Writes one layer of every block. A failure is raised by `finish`."""
        layout = self._layout
        if self._error is None:
            try:
                for rank in range(layout.ranks):
                    start = rank * layout.rank_bytes + layer * layout.layer_bytes
                    self._write(sender, start, layout.layer_bytes)
            except TandemError as error:
                self._error = error

    def finish(self, sender: BlockSender, cost: PushCost) -> tuple[int, ...]:
        """Writes what is left and gives the digests in order.

        Returns once the blocks are out of this worker's memory. Raises Unavailable.
        """
        if self._error is not None:
            raise self._error
        block_bytes = self._blocks.block_bytes
        if not self.by_layer:
            self._write(sender, 0, block_bytes)
        begin_s = time.perf_counter()
        sender.flush(timeout_s=_FLUSH_TIMEOUT_S)
        self.written_s += time.perf_counter() - begin_s
        if self._dropped:
            return ()
        num_bytes = len(self._pairs) * block_bytes
        cost.observe_push(pieces=self._pieces, num_bytes=num_bytes, seconds=self.written_s)
        sources = [source for source, _ in self._pairs]
        return self._blocks.digests(self._transfer, self._first_index, sources, sender.name)

    def _write(self, sender: BlockSender, start: int, size: int) -> None:
        begin_s = time.perf_counter()
        for offset, (source, target) in enumerate(self._pairs):
            if self._dropped:
                break
            data = self._blocks.piece(source, start, size, sender.name)
            sender.write(self._transfer, self._first_index + offset, target, start, data)
            self._pieces += 1
        self.written_s += time.perf_counter() - begin_s
