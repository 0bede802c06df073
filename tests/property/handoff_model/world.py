"""The model world: workers in their lives, streams, writes, gateways, and every fault at any time.

A world only changes by moves, each of which is one turn of one process's event loop or thread, one
message or write that arrives, or one fault. `check` holds after every move. `settle` brings a world
to rest without a timer where that is possible, and then everything must be back.
"""

from collections import Counter, defaultdict, deque
from functools import partial

from handoff_model.decode import DecodeWorker
from handoff_model.gateway import Port
from handoff_model.network import Kind, Stream, Violation
from handoff_model.prefill import PrefillWorker

from core.messages import TransferId
from kv_transfer import states
from kv_transfer.states import RECEIVER, SENDER, ReceiverState, SenderState

MAX_ATTEMPTS = 3
_SETTLE_MOVES = 5000


class CountingMachine(states.Machine):
    """A machine that counts the edges it takes."""

    __slots__ = ("edges",)

    def __init__(self, table, state, edges):
        super().__init__(table, state)
        self.edges = edges

    def move(self, event):
        state = self.state
        actions = super().move(event)
        self.edges[state, event] += 1
        return actions


class World:
    """Two prefill and two decode workers by default; pools so small that blocks are soon reused."""

    def __init__(
        self,
        *,
        receiver=RECEIVER,
        sender=SENDER,
        one_sided=lambda prefill, decode: True,
        faults=frozenset(),
        num_prefills=2,
        num_decodes=2,
        prefill_blocks=5,
        decode_blocks=7,
    ):
        self._receiver = receiver
        self._sender = sender
        self._one_sided = one_sided
        self.faults = faults  # of kind DeskFault
        self._num_blocks = {PrefillWorker: prefill_blocks, DecodeWorker: decode_blocks}
        self._num_lives = 0
        self.lives = {}
        self.prefills = {}
        self.decodes = {}
        self.ports = {}
        self.left_ports = []  # (worker, port) whose loss the worker has not noticed
        self.outcomes = defaultdict(list)
        self.attempts = {}  # request id -> attempts begun
        self.sizes = {}  # request id -> prompt blocks
        self.asked = {}  # transfer -> the port that its Start went to
        self.history = deque(maxlen=48)
        self.edges = Counter()
        self.counts = Counter()
        for i in range(num_prefills):
            self._begin_life(PrefillWorker, f"prefill-{i}")
        for i in range(num_decodes):
            self._begin_life(DecodeWorker, f"decode-{i}")

    # --- what workers need ---------------------------------------------------------------------

    def receiver_machine(self):
        return CountingMachine(self._receiver, ReceiverState.RESERVED, self.edges)

    def sender_machine(self):
        return CountingMachine(self._sender, SenderState.ACCEPTED, self.edges)

    def open_stream(self, decode, prefill_ref):
        prefill = self.lives[prefill_ref]
        one_sided = self._one_sided(prefill.ref.name, decode.ref.name)
        stream = Stream(decode, prefill, one_sided)
        if prefill.alive:
            prefill.streams.append(stream)
        return stream

    def is_dead(self, prefill_ref, decode):
        """As the receivers' `is_dead`: no process, or none of its senders to `decode` is open."""
        prefill = self.lives[prefill_ref]
        return not prefill.alive or not any(
            peer.sender_open for peer in prefill.peers if peer.ref == decode.ref
        )

    def _begin_life(self, kind, name):
        self._num_lives += 1
        life = kind(self, name, self._num_lives, self._num_blocks[kind])
        self.lives[life.ref] = life
        if kind is DecodeWorker:
            self.decodes[name] = life
            self.ports[name] = Port(self, life)
        else:
            self.prefills[name] = life

    @property
    def workers(self):
        return [*self.prefills.values(), *self.decodes.values()]

    @property
    def busy(self):
        """Whether some request is under way, or a worker has something of one left."""
        return any(port.orders or port.running for port in self.ports.values()) or any(
            _held(worker) for worker in self.workers
        )

    # --- requests ------------------------------------------------------------------------------

    def start(self, prefill_pick, decode_pick, num_prompt_blocks, *, retry, stale):
        """A new request, or another attempt of one whose last attempt failed.

        `stale`: the scheduler may not have noticed yet that a worker is dead.
        """
        prefill = _pick(self._placeable(self.prefills, stale), prefill_pick)
        decode = _pick(self._placeable(self.decodes, stale), decode_pick).ref.name
        failed = [key for key in self.attempts if retry and self._may_retry(key)]
        if failed:
            request_id = failed[0]
        else:
            request_id = f"r{len(self.attempts)}"
            self.sizes[request_id] = num_prompt_blocks
        attempt = self.attempts.get(request_id, 0) + 1
        self.attempts[request_id] = attempt
        transfer = TransferId(request_id=request_id, attempt=attempt)
        port = self.asked[transfer] = self.ports[decode]
        if port.up:
            port.running.add(transfer)
            port.orders.append(("start", transfer, prefill.ref))
        else:
            self.outcomes[transfer].append("lost")

    def _placeable(self, workers, stale):
        alive = [worker for worker in workers.values() if worker.alive or stale]
        return alive or list(workers.values())

    def _may_retry(self, request_id):
        attempt = self.attempts[request_id]
        outcome = self.outcomes.get(TransferId(request_id=request_id, attempt=attempt))
        return attempt < MAX_ATTEMPTS and outcome in (["error"], ["lost"])

    def _hear_gateway(self, port):
        order, transfer, prefill_ref = port.orders.popleft()
        if order == "cancel":
            port.worker.cancel(transfer)
        else:
            size = self.sizes[transfer.request_id]
            port.worker.start(transfer, prefill_ref, port, size, 1)

    def _gateway_left(self, entry):
        self.left_ports.remove(entry)
        worker, port = entry
        worker.gateway_left(port)

    # --- moves that only let time pass ---------------------------------------------------------

    def progress(self):
        """What can happen now by itself, as callables."""
        moves = []
        for port in self.ports.values():
            if port.orders and port.worker.running:
                moves.append(partial(self._hear_gateway, port))
        for entry in self.left_ports:
            if entry[0].running:
                moves.append(partial(self._gateway_left, entry))
        for decode in self.decodes.values():
            if decode.running:
                moves += self._decode_moves(decode)
        for prefill in self.prefills.values():
            if prefill.running:
                moves += self._prefill_moves(prefill)
        for life in self.lives.values():
            if isinstance(life, PrefillWorker):
                moves += self._data_moves(life)
        return moves

    def _decode_moves(self, decode):
        for link in decode.streams:
            if link.stalled:
                continue
            if link.to_decode:
                yield partial(self._to_decode, link)
            elif link.broken or not link.prefill_up:
                yield partial(decode.notices, link)
        for session in decode.asking:
            if decode.can_ask(session):
                yield partial(decode.ask_goes_on, session)
        for task in decode.verifications:
            if decode.can_verify(task):
                yield partial(decode.verify_goes_on, task)
        for session in decode.leaving:
            yield partial(decode.left_batch, session)
        for session in decode.watched:
            if decode.can_check(session):
                yield partial(decode.quarantine_checks, session)
        for session in decode.sessions.values():
            if session.state is ReceiverState.ADOPTED and not session.outcome:
                yield partial(decode.finishes, session)

    def _prefill_moves(self, prefill):
        for stream in prefill.streams:
            if stream.retired:
                yield partial(prefill.notices, stream)
            if stream.stalled or stream in prefill.pairing:
                continue
            if stream.to_prefill:
                yield partial(self._to_prefill, stream)
            elif stream.broken or not stream.decode_up:
                yield partial(prefill.notices, stream)
        for stream in prefill.pairing:
            if prefill.can_pair(stream):
                yield partial(prefill.pair_goes_on, stream)
        for sending in prefill.engine:
            if sending.in_step:
                yield partial(prefill.step_ends, sending, False)
                yield partial(prefill.step_ends, sending, True)
            else:
                yield partial(prefill.step_begins, sending, 1)
                yield partial(prefill.step_begins, sending, 2)
        for sending in prefill.drains:
            if prefill.can_drain(sending):
                yield partial(prefill.drain_goes_on, sending)
        for peer in prefill.peers:
            if peer.in_flight is None and (peer.current or peer.jobs):
                yield partial(prefill.thread_goes_on, peer)
        if prefill.finished:
            yield prefill.job_seen

    def _data_moves(self, prefill):
        for peer in prefill.peers:
            if peer.in_flight is not None:
                yield partial(self._land, peer)
            for write in peer.unknown:
                yield partial(self._land_late, peer, write)
            decode = peer.stream.decode
            if peer.frames and (decode.running or not decode.alive):
                yield partial(self._frame, peer)

    def _to_decode(self, link):
        message = link.to_decode.popleft()
        self.history.append((link, message))
        link.decode.hears(link, message)

    def _to_prefill(self, stream):
        message = stream.to_prefill.popleft()
        if message.kind is not Kind.HELLO:
            self.history.append((stream, message))
        stream.prefill.hears(stream, message)

    def _land(self, peer):
        write, peer.in_flight = peer.in_flight, None
        if peer.stream.decode.alive:
            self.counts["landed"] += 1
            peer.stream.decode.lands(write.transfer, write.target, write.value)

    def _land_late(self, peer, write):
        peer.unknown.remove(write)
        if peer.stream.decode.alive:
            peer.stream.decode.lands(write.transfer, write.target, write.value)

    def _frame(self, peer):
        write = peer.frames.popleft()
        if peer.stream.decode.alive:
            self.counts["frames"] += 1
            peer.stream.decode.frame_arrives(write)

    def arrival_timers(self):
        """Waits for bytes that may not come."""
        return [
            partial(decode.verify_goes_on, task, timed_out=True)
            for decode in self.decodes.values()
            if decode.running
            for task in decode.verifications
            if not task.arrived and not task.one_sided
        ]

    # --- what befalls processes -----------------------------------------------------------------

    def lose_port(self, port):
        """The gateway's stream to a decode worker ends, as the gateway sees it."""
        port.lose()
        self.left_ports.append((port.worker, port))
        self.ports[port.worker.ref.name] = Port(self, port.worker)

    def kill(self, worker):
        """SIGKILL: nothing of this life is left but what it has sent."""
        worker.alive = worker.frozen = False
        for stream in worker.streams:
            stream.broken = True
            if worker is stream.decode:
                stream.decode_up = False
                stream.to_decode.clear()
            else:
                stream.prefill_up = False
                stream.to_prefill.clear()
        if isinstance(worker, DecodeWorker):
            self.ports[worker.ref.name].lose()
            self.left_ports = [entry for entry in self.left_ports if entry[0] is not worker]
        else:
            for peer in worker.peers:
                peer.in_flight = None  # no process, no copy
                peer.unknown.clear()

    def restart(self, worker):
        """Its next life, which knows nothing of the last one."""
        self._begin_life(type(worker), worker.ref.name)

    # --- promises ------------------------------------------------------------------------------

    def check(self):
        """What holds after every move. Raises Violation, or what the block manager raises."""
        for decode in self.decodes.values():
            if decode.alive:
                decode.check()
        for prefill in self.prefills.values():
            if prefill.alive:
                prefill.check()
                for decode, transfer, block in prefill.targets():
                    if decode.alive and not decode.holds(transfer, block):
                        raise Violation(
                            f"block {block} of {decode.ref} is not {transfer}'s any more, "
                            f"and {prefill.ref} may still write it"
                        )
        for transfer, told in self.outcomes.items():
            if len(told) > 1:
                raise Violation(f"{transfer} has the outcomes {told}")

    def settle(self):
        """Fences the frozen, restarts the dead and lets everything that is under way end.

        No deadline and no lease may be needed for it; only bytes that a broken connection has lost
        are waited for in vain. Then every pool is free and every attempt has one outcome.
        """
        for worker in self.workers:
            if worker.frozen:
                self.kill(worker)
        for worker in self.workers:
            if not worker.alive:
                self.restart(worker)
            for stream in worker.streams:
                stream.stalled = False
        for _ in range(_SETTLE_MOVES):
            moves = self.progress() or self.arrival_timers()
            if not moves:
                break
            moves[0]()
            self.check()
        else:
            raise Violation(f"no rest after {_SETTLE_MOVES} moves")
        self._check_all_is_back()

    def _check_all_is_back(self):
        for worker in self.workers:
            if worker.blocks.num_available != worker.blocks.num_blocks:
                held = {str(key): each.machine.state for key, each in _held(worker).items()}
                raise Violation(f"{worker.ref} keeps {worker.blocks.counts()}: {held}")
            if _held(worker):
                raise Violation(f"{worker.ref} keeps {list(_held(worker))}")
        for request_id, attempts in self.attempts.items():
            for attempt in range(1, attempts + 1):
                transfer = TransferId(request_id=request_id, attempt=attempt)
                if len(self.outcomes[transfer]) != 1:
                    raise Violation(f"{transfer} has the outcomes {self.outcomes[transfer]}")


def _held(worker):
    return worker.sessions if isinstance(worker, DecodeWorker) else worker.sendings


def _pick(choices, number):
    return choices[number % len(choices)]
