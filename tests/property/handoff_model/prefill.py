"""One life of a prefill worker in the model. Mirrors `prefill_worker.desk`, call for call.

What the desk awaits is a step of its own here, so that anything can happen in between.
"""

from collections import deque

from handoff_model.data_plane import Peer, Write, WriteJob
from handoff_model.faults import DeskFault
from handoff_model.network import Kind, Message, Violation

from core.messages import WorkerRef
from engine.block_manager import BlockManager, LeaseState, OutOfBlocks
from kv_transfer.states import SenderAction, SenderEvent, SenderState

_COMPUTING = (SenderState.ACCEPTED, SenderState.SENDING)


class Sending:
    """As `prefill_worker.desk.Sending`."""

    def __init__(self, order, peer, lease, machine):
        self.order = order
        self.peer = peer
        self.lease = lease
        self.machine = machine
        self.num_blocks = len(order.block_ids)
        self.computed = 0
        self.queued = 0
        self.in_engine = True
        self.in_step = 0  # blocks that the step under way computes
        self.first_token = False
        self.ended = False
        self.jobs: list[WriteJob] = []
        self.writes: set[WriteJob] = set()
        self.digests: list[object] = []
        self.draining = False  # its writes are dropped and it has left the batch
        self.timer: SenderEvent | None = SenderEvent.GIVE_UP

    @property
    def transfer(self):
        return self.order.transfer


class PrefillWorker:
    """Its desk, its engine's steps and its writer threads."""

    def __init__(self, world, name, incarnation, num_blocks):
        self.world = world
        self.ref = WorkerRef(name=name, incarnation=str(incarnation))
        self.blocks = BlockManager(num_blocks)
        self.content: dict[int, object] = {}
        self.sendings: dict[object, Sending] = {}
        self.engine: list[Sending] = []  # in the batch, or in the step under way
        self.drains: list[Sending] = []  # `_drain` tasks
        self.streams = []  # that reached this life and that it has not given up
        self.pairing = []  # streams whose hello came
        self.peers: list[Peer] = []
        self.finished: deque[tuple[WriteJob, str]] = deque()  # ends not seen by the event loop yet
        self.alive = True
        self.frozen = False

    @property
    def running(self):
        return self.alive and not self.frozen

    # --- streams -------------------------------------------------------------------------------

    def hears(self, stream, message):
        """One message, in the order of its stream."""
        match message.kind:
            case Kind.HELLO:
                self.pairing.append(stream)
            case Kind.PREFILL:
                self.prefill(message, stream.peer)
            case Kind.CANCEL:
                self.cancel(message.transfer, stream.peer)
            case Kind.ADOPTED:
                self.adopted(message.transfer)

    def can_pair(self, stream):
        """Whether a pairing waits for nothing but its turn."""
        older = self._older(stream)
        return not older or not all(peer.stream.retired for peer in older)

    def pair_goes_on(self, stream):
        """One stream per receiver: older ones end, and their senders close, before a welcome."""
        if older := self._older(stream):
            for peer in older:
                peer.stream.retire()
        else:
            self._paired(stream)

    def _older(self, stream):
        if self.world.faults & {DeskFault.WELCOMED_TOO_EARLY, DeskFault.LAST_PAIRED_ORDERS}:
            return []
        ref = stream.decode.ref
        return [peer for peer in self.peers if peer.ref == ref and peer.sender_open]

    def _last_paired(self, peer):
        same = [each for each in self.peers if each.ref == peer.ref]
        return same[-1] if same[-1].stream.prefill_up else None

    def _paired(self, stream):
        self.pairing.remove(stream)
        stream.peer = Peer(stream.decode.ref, stream)
        self.peers.append(stream.peer)
        stream.answer(Message(Kind.WELCOME, prefill=self.ref))

    def notices(self, stream):
        """The stream ended as seen from here."""
        if stream in self.pairing:
            self.pairing.remove(stream)
        stream.prefill_up = False
        stream.broken = True
        stream.to_prefill.clear()
        self.streams.remove(stream)
        if (peer := stream.peer) is not None:
            for sending in list(self.sendings.values()):
                if sending.peer is peer:
                    self.happened(sending, SenderEvent.PEER_LOST)
            for job in peer.close():
                self.finished.append((job, "cancelled"))
            peer.try_close()

    # --- what the peers say --------------------------------------------------------------------

    def prefill(self, order, peer):
        if order.transfer in self.sendings:
            return
        fenced = DeskFault.LAST_PAIRED_ORDERS in self.world.faults
        if fenced and self._last_paired(peer) is not peer:
            return
        refused = Message(Kind.REFUSED, order.transfer)
        if order.prefill != self.ref or order.decode != peer.ref:
            peer.stream.answer(refused)
            return
        try:
            lease = self.blocks.acquire(len(order.block_ids))
        except OutOfBlocks:
            peer.stream.answer(refused)
            return
        sending = Sending(order, peer, lease, self.world.sender_machine())
        self.sendings[order.transfer] = sending
        self.engine.append(sending)
        peer.stream.answer(Message(Kind.ACCEPTED, order.transfer))

    def cancel(self, transfer, peer):
        sending = self.sendings.get(transfer)
        if sending is None:
            peer.stream.answer(Message(Kind.QUIESCED, transfer))
            return
        sending.peer = peer
        self.happened(sending, SenderEvent.CANCEL)

    def adopted(self, transfer):
        if (sending := self.sendings.get(transfer)) is not None:
            self.happened(sending, SenderEvent.ADOPTED)

    # --- the engine ----------------------------------------------------------------------------

    def step_begins(self, sending, num_blocks):
        sending.in_step = min(num_blocks, sending.num_blocks - sending.computed)

    def step_ends(self, sending, ended):
        """The step wrote its blocks, whether or not somebody still wants them."""
        span = range(sending.computed, sending.computed + sending.in_step)
        if sending.lease.state is LeaseState.RELEASED:
            raise Violation(f"a step of {sending.transfer} writes blocks that {self.ref} freed")
        for index in span:
            self.content[sending.lease.block_ids[index]] = (sending.transfer, index)
        sending.in_step = 0
        if not sending.in_engine:
            self.engine.remove(sending)
            return
        sending = self.sendings[sending.transfer]
        sending.computed = span.stop
        if sending.computed == sending.num_blocks:
            sending.in_engine = False
            self.engine.remove(sending)
            sending.first_token = True
            sending.ended = ended
        self.happened(sending, SenderEvent.CHUNK)

    def gives_up(self, sending):
        self.happened(sending, SenderEvent.GIVE_UP)

    def timer_fires(self, sending):
        event, sending.timer = sending.timer, None
        self.happened(sending, event)

    # --- the writer threads --------------------------------------------------------------------

    def thread_goes_on(self, peer):
        """One block's worth of a writer thread."""
        if peer.current is None:
            peer.current = peer.jobs.popleft()
            return
        job = peer.current
        if job.over:
            self._job_ends(peer, "written")
            return
        if peer.failing:
            if peer.stream.one_sided:
                peer.unknown.append(self._next_write(job))
            self._job_ends(peer, "failed")
            return
        if job.sending.lease.state is LeaseState.RELEASED:
            raise Violation(f"{self.ref} sends blocks of {job.sending.transfer} that it freed")
        write = self._next_write(job)
        if peer.stream.one_sided:
            peer.in_flight = write
        else:
            peer.frames.append(write)

    def _next_write(self, job):
        index, source, target = job.pairs.pop(0)
        value = self.content[source]
        job.digests.append((job.sending.transfer, index, value))
        return Write(job.sending.transfer, index, target, value)

    def _job_ends(self, peer, how):
        self.finished.append((peer.current, how))
        peer.current = None
        peer.try_close()

    def job_seen(self):
        """The event loop goes on after a job: `_written` of the desk. Jobs are seen in order."""
        job, how = self.finished.popleft()
        sending = job.sending
        sending.writes.discard(job)
        if how == "cancelled":
            return
        if how == "failed":
            sending.peer.give_up()
            self.happened(sending, SenderEvent.GIVE_UP)
            return
        sending.digests += job.digests
        if job.last:
            self.happened(sending, SenderEvent.WRITTEN)
        else:
            sending.peer.stream.answer(Message(Kind.CHUNK, sending.transfer))

    # --- the machine's actions -----------------------------------------------------------------

    def happened(self, sending, event):
        for action in sending.machine.move(event):
            match action:
                case SenderAction.WRITE:
                    self._write(sending)
                case SenderAction.SEND_COMMIT:
                    self._commit(sending)
                case SenderAction.DRAIN:
                    self.drains.append(sending)
                case SenderAction.RELEASE:
                    self._release(sending)
                case SenderAction.SEND_QUIESCED if not sending.peer.broken:
                    sending.peer.stream.answer(Message(Kind.QUIESCED, sending.transfer))

    def _write(self, sending):
        first, end = sending.queued, sending.computed
        sending.queued = end
        if sending.ended:
            for job in sending.jobs:
                job.dropped = True
        if end == first and not sending.first_token:
            return
        span = range(first, first if sending.ended else end)
        pairs = [(i, sending.lease.block_ids[i], sending.order.block_ids[i]) for i in span]
        job = WriteJob(sending, pairs, sending.first_token)
        sending.jobs.append(job)
        sending.writes.add(job)
        sending.peer.jobs.append(job)

    def _commit(self, sending):
        digests = () if sending.ended else tuple(sending.digests)
        commit = Message(Kind.COMMIT, sending.transfer, digests=digests, ended=sending.ended)
        sending.peer.stream.answer(commit)
        sending.timer = SenderEvent.LEASE_OVER

    def can_drain(self, sending):
        """Whether what `_drain` awaits has come."""
        idle = not sending.in_step and not sending.writes
        return idle or not sending.draining

    def drain_goes_on(self, sending):
        if not sending.draining:
            for job in sending.jobs:
                job.dropped = True
            sending.draining = True
            sending.in_engine = False
            if sending in self.engine and not sending.in_step:
                self.engine.remove(sending)
        else:
            self.drains.remove(sending)
            self.happened(sending, SenderEvent.DRAINED)

    def _release(self, sending):
        sending.timer = None
        sending.lease.release()
        del self.sendings[sending.transfer]

    # --- promises ------------------------------------------------------------------------------

    def targets(self):
        """(decode worker's life, transfer, block) that a one-sided write of this life may reach."""
        for sending in self.sendings.values():
            if sending.machine.state in _COMPUTING and sending.peer.stream.one_sided:
                for target in sending.order.block_ids[sending.queued :]:
                    yield sending.peer.stream.decode, sending.transfer, target
        for peer in self.peers:
            for write in peer.pending:
                yield peer.stream.decode, write.transfer, write.target
            if peer.stream.one_sided:
                for job in (peer.current, *peer.jobs):
                    if job is not None and not job.over:
                        for _, _, target in job.pairs:
                            yield peer.stream.decode, job.sending.transfer, target

    def check(self):
        self.blocks.check()
        for sending in self.sendings.values():
            if sending.lease.state is LeaseState.RELEASED:
                raise Violation(f"{sending.transfer} is in {self.ref} without its blocks")
