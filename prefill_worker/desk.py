"""The prefill worker's one owner of state: takes prompts, feeds the engine, sends what it computed.

Everything happens on the event loop. Messages, steps, timers and finished writes become events of
the sender's machine (`kv_transfer.states`); this module carries its actions out. When blocks
leave is `prefill_worker.pusher`'s to say.
"""

import asyncio
import collections
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import structlog

from core.config import TransferConfig
from core.errors import (
    DeadlineExceeded,
    Incompatible,
    Internal,
    InvalidRequest,
    Moved,
    TandemError,
    Unavailable,
    WorkerLost,
    to_failure,
)
from core.messages import (
    Accepted,
    CacheNews,
    ChunkSent,
    Commit,
    Counter,
    Prefill,
    PromptScored,
    Quiesced,
    Refused,
    StopReason,
    TransferId,
    WorkerLoad,
    WorkerRef,
)
from core.metrics.worker import WorkerMetrics
from core.telemetry.tracer import NO_TRACER, Tracer
from core.tickets import Claim, Right, Tickets
from engine.engine import Engine, SequenceEvent
from engine.host import EngineHost
from engine.sequence import Sequence, SequenceKey
from kv_transfer import states
from kv_transfer.blocks import BlockStore, block_store
from kv_transfer.layout import KvLayout
from kv_transfer.reshaped import blocks_for
from kv_transfer.states import SenderAction, SenderEvent, SenderState
from prefill_worker.peer import Peer
from prefill_worker.pusher import Pusher
from prefill_worker.sending import Sending
from prefill_worker.spans import SendingSpans


class PrefillDesk:
    """Owns the transfers and the engine of one prefill worker."""

    def __init__(
        self,
        me: WorkerRef,
        host: EngineHost,
        config: TransferConfig,
        tickets: Tickets,
        metrics: WorkerMetrics | None = None,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self._me = me
        self._host = host
        self._config = config
        self._tickets = tickets
        self._sending: dict[TransferId, Sending] = {}
        self._peers: set[Peer] = set()
        self._store = block_store(
            host.kv.bytes,
            host.kv.device_bytes,
            await_written=host.kv.await_written,
            device_digests=host.device_digests(),
        )
        self._layout = KvLayout(
            ranks=host.spec.ranks,
            num_layers=host.spec.num_layers,
            block_size=host.block_size,
            num_kv_heads=host.num_kv_heads,
            head_bytes=host.spec.head_bytes,
        )
        self._pusher = Pusher(host.spec, config, self._sending)
        self._engine: Engine = host.engine(
            on_step=self._stepped, on_error=self._step_failed, layer_tap=self._pusher.tap
        )
        self._metrics = metrics
        self._tracer = tracer
        if metrics is not None:
            self._engine.on_measured = metrics.stepped
        # Hears of each request whose prompt was accepted.
        self.on_accepted: Callable[[str], None] = _nobody_asks
        # What the last receiver could not work with; None where it could.
        self.incompatible: str | None = None
        self._tasks = asyncio.TaskGroup()
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False
        self._ended = False
        self._counts: collections.Counter[str] = collections.Counter()
        self._log = structlog.get_logger()

    async def run(self) -> None:
        """Computes and sends until cancelled."""
        try:
            async with self._tasks:
                self._tasks.create_task(self._engine.run())
        finally:
            self._ended = True

    async def drained(self) -> None:
        """Returns once no transfer is left. New ones are refused from now on."""
        self.draining = True
        await self.idle()

    async def idle(self) -> None:
        """Returns once no transfer is left, though others may come."""
        await self._idle.wait()

    def hand_over(self) -> tuple[str, ...]:
        """Nothing: a prompt is read to its end, which is soon."""
        return ()

    @property
    def stalled_s(self) -> float:
        """For how long the step loop has had work and has not come round."""
        return self._engine.stalled_s

    def not_ready(self) -> str | None:
        """Why no prompt is taken now; None where one is."""
        return "it is draining" if self.draining else self.incompatible

    def blocks_for(self, ranks: int) -> tuple[BlockStore, KvLayout]:
        """This worker's blocks for a peer of so many ranks, and its layout. Raises Incompatible."""
        theirs = self._layout.with_ranks(ranks)
        if theirs != self._layout and self._host.kv.device_bytes is not None:
            raise Incompatible(f"this worker's blocks are on a GPU, and the peer has {ranks} ranks")
        return blocks_for(self._store, self._host.kv.bytes, self._layout, theirs), theirs

    def leases(self) -> Mapping[str, int]:
        """Transfers by the state of their machine."""
        return states.tally(SenderState, (each.state for each in self._sending.values()))

    def load(self) -> WorkerLoad:
        """What the scheduler is told."""
        return WorkerLoad(
            blocks=self._host.blocks.counts(),
            num_running=self._engine.num_running,
            num_waiting=self._engine.num_waiting,
            backlog_tokens=self._engine.backlog_tokens,
            prefill_tokens_per_s=self._engine.pacer.prompt_tokens_per_s(0),
            step_s=self._engine.pacer.step_s,
            cost=self._engine.pacer.cost.cost(),
            draining=self.draining,
            counters=self._counters(),
        )

    def cache_news(self, whole: bool) -> CacheNews:
        """What the prefix cache holds, or what it has gained and lost since it was last told."""
        return self._host.cache_news(whole=whole)

    def report_when_it_matters(self, report_now: Callable[[], None]) -> None:
        """Nothing here is urgent: prompts wait in the scheduler."""

    def _counters(self) -> tuple[Counter, ...]:
        if self._host.blocks.counts().total != self._host.spec.num_blocks:
            self._counts["ledger_errors"] += 1
            self._log.error("blocks_lost", counts=self._host.blocks.counts())
        counts = self._counts.copy()
        counts["blocks_evicted"] = self._host.blocks.num_evicted
        for peer in self._peers:
            counts.update(_sent(peer))
        return tuple(Counter(name=name, value=n) for name, n in sorted(counts.items()))

    # --- what the peers say --------------------------------------------------------------------

    def peer_joined(self, peer: Peer) -> None:
        """A decode worker was paired."""
        self._peers.add(peer)
        self.incompatible = None
        self._counts[f"{peer.sender.name}_pairings"] += 1

    def prefill(self, order: Prefill, peer: Peer) -> None:
        """Takes a prompt, or refuses it with a reason. A repeated order is dropped."""
        if order.transfer in self._sending:
            self._counts["stale_messages"] += 1
            return
        try:
            self._accept(order, peer)
        except TandemError as error:
            self._counts[f"refused_{error.code}"] += 1
            peer.send(Refused(transfer=order.transfer, failure=to_failure(error)))

    def _accept(self, order: Prefill, peer: Peer) -> None:
        accepted_s = time.monotonic()
        if order.prefill != self._me:
            raise WorkerLost(f"{order.prefill} is gone; this is {self._me}", culprit=order.prefill)
        claim = Claim(
            right=Right.HANDOFF, prefill=self._me, decode=peer.ref, transfer=order.transfer
        )
        self._tickets.check(claim, order.ticket)
        if self.draining:
            raise Moved(f"{self._me} takes no prompts now")
        if order.remaining_s <= 0:
            raise DeadlineExceeded("the deadline passed before the prefill")
        self._host.check_tokens(order.token_ids)
        if not 0 < order.num_prompt_tokens <= len(order.token_ids):
            raise InvalidRequest(
                f"{order.num_prompt_tokens} of {len(order.token_ids)} tokens are the prompt",
                field="num_prompt_tokens",
            )
        num_blocks = self._host.blocks_for(len(order.token_ids))
        if not 0 <= order.first_block < num_blocks:
            raise InvalidRequest(
                f"first block {order.first_block} of a prompt of {num_blocks}", field="first_block"
            )
        if len(order.block_ids) != num_blocks - order.first_block:
            raise InvalidRequest(
                f"{len(order.block_ids)} target blocks for {num_blocks - order.first_block}",
                field="block_ids",
            )
        leased = self._host.lease(
            order.token_ids,
            len(order.token_ids),
            order.cache_salt,
            reuse=not order.sampling.prompt_logprobs,
        )
        num_cached = leased.lease.num_shared
        cached_tokens = num_cached * self._host.block_size
        self._counts["prefix_cache_queries"] += len(order.token_ids)
        self._counts["prefix_cache_hits"] += cached_tokens
        spans = SendingSpans(self._tracer, order, accepted_s)
        sending = Sending(order, peer, leased.lease, cached_tokens, accepted_s, spans)
        self._sending[order.transfer] = sending
        self._idle.clear()
        self._engine.add(
            Sequence(
                key=sending.key,
                token_ids=list(order.token_ids),
                num_prompt_tokens=order.num_prompt_tokens,
                num_computed_tokens=cached_tokens,
                lease=leased.lease,
                sampling=order.sampling,
                prefill_only=True,
                cache_salt=order.cache_salt,
                block_hashes=leased.hashes,
                num_published_blocks=num_cached,
            )
        )
        self._set_timer(sending, order.remaining_s, SenderEvent.GIVE_UP)
        peer.send(Accepted(transfer=order.transfer))
        self.on_accepted(order.transfer.request_id)
        if num_cached > order.first_block:  # what the receiver lacks and is here leaves at once
            sending.num_computed_blocks = num_cached - order.first_block
            self._happened(sending, SenderEvent.CHUNK)

    def cancel(self, transfer: TransferId, peer: Peer) -> None:
        """The receiver gave up. It hears Quiesced, at once where nothing is under way."""
        sending = self._sending.get(transfer)
        if sending is None:
            peer.send(Quiesced(transfer=transfer))
            return
        sending.peer = peer  # the stream that asked last gets the answer
        self._happened(sending, SenderEvent.CANCEL)

    def keep_trace(self, request_id: str) -> None:
        """What was recorded of this request is to be exported."""
        self._tracer.keep(request_id)

    def adopted(self, transfer: TransferId) -> None:
        """The receiver has taken over."""
        if (sending := self._sending.get(transfer)) is None:
            self._counts["stale_messages"] += 1
            return
        self._happened(sending, SenderEvent.ADOPTED)

    def peer_lost(self, peer: Peer) -> None:
        """The peer's stream ended: whatever is on its way there stops."""
        self._peers.discard(peer)
        self._counts.update(_sent(peer))
        if self._ended:
            return
        for sending in list(self._sending.values()):
            if sending.peer is peer:
                self._happened(sending, SenderEvent.PEER_LOST)

    # --- what the engine says ------------------------------------------------------------------

    def _stepped(self, events: tuple[SequenceEvent, ...]) -> None:
        now_s = time.monotonic()
        self._pusher.learn(events[0].compute_s)
        spans = (self._sending[each.key.transfer].spans for each in events)
        linked = [(each.trace, each.prefill) for each in spans if each.trace.sampled]
        self._tracer.step(
            now_s - events[0].compute_s,
            now_s,
            linked,
            sequences=len(events),
            number=self._engine.steps,
        )
        for event in events:
            sending = self._sending[event.key.transfer]
            if not sending.began:
                sending.began = True
                sending.prefill_wait_s = now_s - event.compute_s - sending.accepted_s
            since_accepted_s = now_s - sending.accepted_s
            sending.prefill_compute_s = since_accepted_s - sending.prefill_wait_s
            sending.spans.chunk(now_s, event.num_computed_tokens, event.compute_s)
            if event.prompt_logprobs:
                scored = PromptScored(transfer=sending.transfer, logprobs=event.prompt_logprobs)
                sending.peer.send(scored)
            if event.token_id is None:
                computed = event.num_computed_tokens // self._host.block_size
                sending.num_computed_blocks = max(0, computed - sending.order.first_block)
            else:  # the last block is sent though it is not full
                sending.num_computed_blocks = len(sending.order.block_ids)
                sending.first_token_id = event.token_id
                sending.first_logprobs = event.logprobs
                sending.stop_reason = event.stop_reason or StopReason.UNSPECIFIED
                sending.spans.computed(
                    now_s, cached_tokens=sending.cached_tokens, wait_s=sending.prefill_wait_s
                )
            self._happened(sending, SenderEvent.CHUNK)

    def _step_failed(self, keys: tuple[SequenceKey, ...], error: Exception) -> None:
        failed: TandemError | None = error if isinstance(error, InvalidRequest) else None
        if failed is None:
            self._log.error("step_failed", requests=[str(key) for key in keys], exc_info=error)
            failed = Internal(f"the step failed: {type(error).__name__}")
        for key in keys:
            self._give_up(self._sending[key.transfer], failed)

    def _give_up(self, sending: Sending, error: TandemError) -> None:
        sending.failure = sending.failure or to_failure(error)
        self._happened(sending, SenderEvent.GIVE_UP)

    # --- the machine's actions -----------------------------------------------------------------

    def _happened(self, sending: Sending, event: SenderEvent) -> None:
        for action in sending.machine.move(event):
            match action:
                case SenderAction.WRITE:
                    self._write(sending)
                case SenderAction.SEND_COMMIT:
                    self._commit(sending)
                case SenderAction.DRAIN:
                    self._spawn(self._drain(sending))
                case SenderAction.RELEASE:
                    self._release(sending)
                case SenderAction.SEND_QUIESCED:
                    if not sending.peer.broken:
                        quiesced = Quiesced(transfer=sending.transfer, failure=sending.failure)
                        sending.peer.send(quiesced)

    def _write(self, sending: Sending) -> None:
        """Sends what was computed since the last time; the last time, sees to the commit."""
        if (digests := self._pusher.begin(sending)) is None:
            return
        sending.spans.sends(time.monotonic())
        last = sending.first_token_id is not None
        write = self._spawn(self._written(sending, digests, last=last))
        sending.writes.add(write)
        write.add_done_callback(sending.writes.discard)

    async def _written(
        self, sending: Sending, digests: asyncio.Future[tuple[int, ...]], *, last: bool
    ) -> None:
        """Waits for one job. Jobs of a peer end in order, so the last one ends them all."""
        try:
            sending.digests += await digests
        except Unavailable as error:
            sending.peer.give_up()
            self._give_up(sending, error)
            return
        except Exception as error:
            self._log.error("write_failed", request=str(sending.transfer), exc_info=error)
            self._give_up(sending, Internal(f"the KV write failed: {type(error).__name__}"))
            return
        if last:
            self._happened(sending, SenderEvent.WRITTEN)
        else:
            chunk = ChunkSent(transfer=sending.transfer, num_blocks=len(sending.digests))
            sending.peer.send(chunk)

    def _commit(self, sending: Sending) -> None:
        assert sending.first_token_id is not None
        sending.committed = True
        num_bytes = len(sending.digests) * sending.peer.layout.block_bytes
        busy_s = sum(push.written_s for push in sending.pushes)
        sending.spans.sent(
            time.monotonic(),
            transport=sending.peer.sender.name,
            num_blocks=len(sending.digests),
            num_bytes=num_bytes,
            busy_s=busy_s,
            by_layer=sending.layers is not None,
        )
        if self._metrics is not None:
            self._metrics.transferred(sending.peer.sender.name, num_bytes, busy_s)
        commit = Commit(
            transfer=sending.transfer,
            first_token_id=sending.first_token_id,
            first_logprobs=sending.first_logprobs,
            cached_tokens=sending.cached_tokens,
            digests=tuple(sending.digests) if sending.kv_is_wanted else (),
            stop_reason=sending.stop_reason,
            prefill_wait_s=sending.prefill_wait_s,
            prefill_compute_s=sending.prefill_compute_s,
        )
        sending.peer.send(commit)
        self._set_timer(sending, self._config.adopt_timeout_s, SenderEvent.LEASE_OVER)

    async def _drain(self, sending: Sending) -> None:
        """Until neither a step nor a write touches the transfer's blocks."""
        for push in sending.pushes:
            push.drop()
        await self._engine.remove(sending.key)
        if sending.writes:
            await asyncio.wait(sending.writes)
        await sending.peer.settled()  # layers that were queued beside the step
        self._happened(sending, SenderEvent.DRAINED)

    def _release(self, sending: Sending) -> None:
        if sending.timer is not None:
            sending.timer.cancel()
        sending.lease.release()
        given_up = sending.failure.code if sending.failure is not None else "cancelled"
        sending.spans.over(time.monotonic(), None if sending.committed else given_up)
        del self._sending[sending.transfer]
        if not self._sending:
            self._idle.set()

    def _set_timer(self, sending: Sending, delay_s: float, event: SenderEvent) -> None:
        if sending.timer is not None:
            sending.timer.cancel()
        loop = asyncio.get_running_loop()
        sending.timer = loop.call_later(delay_s, self._timed_out, sending, event)

    def _timed_out(self, sending: Sending, event: SenderEvent) -> None:
        if event is SenderEvent.GIVE_UP:
            self._give_up(sending, DeadlineExceeded("the deadline passed during the prefill"))
        else:
            self._log.warning("adoption_never_came", request=str(sending.transfer))
            self._happened(sending, event)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._tasks.create_task(work)


def _nobody_asks(request_id: str) -> None:
    """Whose prompt was accepted is told to nobody."""


def _sent(peer: Peer) -> dict[str, int]:
    """What went to a peer, by transport: bytes over busy microseconds is the achieved speed."""
    return {f"{peer.sender.name}_{name}": n for name, n in peer.sender.counters().items()}
