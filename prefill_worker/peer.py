"""One decode worker as this prefill worker sees it: a stream to answer on, a way to its blocks."""

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor

from core.messages import HandoffReply, WorkerRef
from core.stream import Outbox
from kv_transfer.blocks import BlockStore
from kv_transfer.cost import PushCost
from kv_transfer.layout import KvLayout
from kv_transfer.metered import MeteredSender
from prefill_worker.push import Push
from protos.tandem.internal.v1 import prefill_pb2


class Peer:
    """Writes to one peer happen on one thread of its own, in order; a stalled peer stalls nobody
    else."""

    def __init__(
        self,
        ref: WorkerRef,
        outbox: Outbox[prefill_pb2.HandoffResponse],
        sender: MeteredSender,
        blocks: BlockStore,
        layout: KvLayout,
    ) -> None:
        """`blocks` are this worker's as the peer wants them, in its `layout`."""
        self.ref = ref
        self.blocks = blocks
        self.layout = layout
        self.sender = sender
        self.broken = False
        self.cost = PushCost()
        self._outbox = outbox
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"kv-to-{ref.name}")

    def give_up(self) -> None:
        """A write failed: what of it may still land is unknown, so nothing is promised any more.

        Ending the stream tells the peer; closing the sender then proves that nothing more lands.
        """
        self.broken = True
        self._outbox.close()

    def send(self, message: HandoffReply) -> None:
        """Answers on the stream. Where that is lost the peer knows, and nobody needs the answer."""
        self._outbox.send(message)

    def finish(self, push: Push) -> asyncio.Future[tuple[int, ...]]:
        """Queues what is left of a push; gives its digests once all is written.

        Raises Unavailable there where the peer is lost.
        """
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._writer, push.finish, self.sender, self.cost)

    def push_layer(self, push: Push, layer: int) -> None:
        """Queues one layer of a push's blocks. Callable from the compute thread."""
        with contextlib.suppress(RuntimeError):  # closed meanwhile: the push is dropped anyway
            self._writer.submit(push.write_layer, self.sender, layer)

    async def settled(self) -> None:
        """Returns once everything queued so far was written or skipped."""
        with contextlib.suppress(RuntimeError, asyncio.CancelledError):
            await asyncio.get_running_loop().run_in_executor(self._writer, _nothing)

    async def close(self) -> None:
        """Waits for the write in progress and lets the peer's memory go."""
        await asyncio.to_thread(self._writer.shutdown, wait=True, cancel_futures=True)
        await asyncio.to_thread(self.sender.close)  # some wait for the other side


def _nothing() -> None:
    """Runs when what was queued before it has run."""
