"""One transfer in a prefill worker, from the accepted prompt to the released blocks."""

import asyncio
from dataclasses import dataclass, field

from core.messages import Failure, Prefill, StopReason, TokenLogprobs, TransferId
from engine.block_manager import BlockLease
from engine.sequence import SequenceKey
from kv_transfer import states
from kv_transfer.states import SenderAction, SenderEvent, SenderState
from prefill_worker.peer import Peer
from prefill_worker.push import Push
from prefill_worker.spans import SendingSpans


@dataclass(slots=True, eq=False)
class Sending:
    """State that the desk alone changes. Times are of this process's monotonic clock."""

    order: Prefill
    peer: Peer
    lease: BlockLease
    cached_tokens: int
    accepted_s: float
    spans: SendingSpans
    machine: states.Machine[SenderState, SenderEvent, SenderAction] = field(
        default_factory=states.sender
    )
    timer: asyncio.TimerHandle | None = None
    # Blocks are counted from `order.first_block` on: those before it are in the receiver's cache.
    # Blocks handed to the peer's thread, and the pushes that carry them.
    num_queued: int = 0
    pushes: list[Push] = field(default_factory=list)
    # The push of the last chunk, where its layers go one by one beside its step.
    layers: Push | None = None
    writes: set[asyncio.Task[None]] = field(default_factory=set)
    digests: list[int] = field(default_factory=list)
    num_computed_blocks: int = 0
    first_token_id: int | None = None
    first_logprobs: TokenLogprobs | None = None
    stop_reason: StopReason = StopReason.UNSPECIFIED
    began: bool = False  # a step for it is over
    prefill_wait_s: float = 0.0
    prefill_compute_s: float = 0.0
    failure: Failure | None = None
    committed: bool = False

    @property
    def transfer(self) -> TransferId:
        return self.order.transfer

    @property
    def key(self) -> SequenceKey:
        return SequenceKey(self.transfer, self.order.choice)

    @property
    def kv_is_wanted(self) -> bool:
        """False where the first token ended all that would be decoded with it."""
        return self.stop_reason is StopReason.UNSPECIFIED or self.order.shared

    @property
    def sources(self) -> tuple[int, ...]:
        """The blocks that go to `order.block_ids`, one to one."""
        return self.lease.block_ids[self.order.first_block :]

    @property
    def state(self) -> SenderState:
        return self.machine.state
