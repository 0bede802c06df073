"""The `collective` transport: one `torch.distributed` process group of two per pair of workers.

The receiver is rank 0, the sender rank 1; gloo carries host memory, NCCL is used where both ends
have a GPU. For each peer the receiver hosts a rendezvous store and waits there, on a thread of the
pair and with a deadline, for a hello with a valid ticket (`kv_transfer.hello`); only then is the
group made. Pieces travel in a few staging slots, and the receiver copies them into its pool under
its windows' lock, so that `revoke` alone is proof.

No call waits for ever: a sender that has nothing to send beats, a receiver that hears nothing for
longer than that gives the group up, and each wait has its own timeout.
"""

import contextlib
import itertools
import struct
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import structlog
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from core.errors import Forbidden, Unavailable
from core.messages import TransferId, TransportOffer, WorkerRef
from core.tickets import Tickets
from kv_transfer.digest import Blocks
from kv_transfer.group import (
    GROUP_TIMEOUT_S,
    HEAD_BYTES,
    NUM_SLOTS,
    RECEIVER,
    SENDER,
    Group,
    best_backend,
    first_line,
)
from kv_transfer.hello import MAX_HELLO_BYTES, check_hello, make_hello
from kv_transfer.windows import Windows

NAME = "collective"
_PAIRING_TIMEOUT_S = 15.0
_STORE_TIMEOUT_S = 5.0
_LOOK_S = 0.02  # between looks for a hello: the store wakes nobody without logging each timeout
_WRITE_TIMEOUT_S = 10.0
_BEAT_S = 1.0
_SILENCE_S = 6.0
_HEAD = struct.Struct("<4sIIIIH")  # magic, attempt, index, offset, length, length of the request id
_HEAD_MAGIC = b"KVCO"
_BEAT = _HEAD.pack(_HEAD_MAGIC, 0, 0, 0, 0, 0)
_KNOCKS = "knocks"


class CollectiveReceiver:
    """The receiving end of a worker: one thread, one store and one group per peer."""

    name = NAME

    def __init__(self, pool: Blocks, me: WorkerRef, host: str, tickets: Tickets) -> None:
        """`pool` is uint8 [num_blocks, block_bytes]."""
        self.windows = Windows(pool)
        self._me = me
        self._host = host
        self._tickets = tickets
        self._pairings: dict[WorkerRef, _Pairing] = {}
        self._num_forbidden = 0
        self._num_rejected = 0
        self._log = structlog.get_logger().bind(transport=NAME)

    def offer(self, writer: WorkerRef) -> TransportOffer:
        """A store of this pair alone; ends an earlier pairing with the same writer.

        Raises Unavailable where the store cannot listen.
        """
        if (earlier := self._pairings.pop(writer, None)) is not None:
            earlier.abandon()
        self._pairings = {w: p for w, p in self._pairings.items() if p.is_alive()}
        pairing = self._pairings[writer] = _Pairing(self, self._host, writer)
        return TransportOffer(
            name=NAME,
            address=f"{self._host}:{pairing.port}",
            payload=f"{best_backend()}:{self.windows.block_bytes}".encode(),
        )

    def open(self, transfer: TransferId, block_ids: Sequence[int]) -> None:
        """Lets the transfer write prompt block i to `block_ids[i]`, until `revoke`."""
        self.windows.open(transfer, block_ids)

    async def arrived(self, transfer: TransferId, *, timeout_s: float) -> bool:
        """Waits until every byte of the window has come; False where the time ran out first."""
        return await self.windows.arrived(transfer, timeout_s=timeout_s)

    def revoke(self, transfer: TransferId) -> bool:
        """Closes the window. True: from now on nothing of this transfer can land."""
        self.windows.close(transfer)
        return True

    def is_dead(self, writer: WorkerRef) -> bool:
        """True: no writer of this transport can reach a block whose window is closed."""
        return True

    def counters(self) -> dict[str, int]:
        """Since the start: messages and bytes, and pairings that failed for what was said."""
        return {
            **self.windows.counters(),
            "rejected_connections": self._num_rejected,
            "forbidden_tickets": self._num_forbidden,
        }

    def check(self, hello: bytes) -> WorkerRef:
        """Raises Forbidden, and counts it, where the hello's ticket does not let its writer in."""
        try:
            return check_hello(self._tickets, self._me, hello)
        except Forbidden as error:
            self._num_forbidden += 1
            self._log.warning("kv_ticket_refused", reason=error.message)
            raise

    def rejected(self, reason: str) -> None:
        """Counts a group that was given up for what came."""
        self._num_rejected += 1
        self._log.warning("kv_connection_closed", reason=reason)

    def close(self) -> None:
        """Ends the threads: those of living pairs within a beat. Idempotent."""
        for pairing in self._pairings.values():
            pairing.abandon()
        for pairing in self._pairings.values():
            pairing.join(timeout_s=2 * _BEAT_S)
        self._pairings.clear()


class _Pairing:
    """One peer: waits for it, makes the group, and receives until it is gone or given up."""

    def __init__(self, receiver: CollectiveReceiver, host: str, writer: WorkerRef) -> None:
        self._receiver = receiver
        self._host = host
        self._writer = writer
        self._abandoned = threading.Event()
        try:
            self._store = TCPStore(
                host,
                0,
                is_master=True,
                timeout=timedelta(seconds=_STORE_TIMEOUT_S),
                wait_for_workers=False,
            )
        except RuntimeError as error:
            raise Unavailable(f"cannot host a store: {first_line(error)}") from error
        self.port = self._store.port
        self._log = structlog.get_logger().bind(transport=NAME, peer=str(writer))
        self._thread = threading.Thread(
            target=self._run, name=f"kv-from-{writer.name}", daemon=True
        )
        self._thread.start()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def abandon(self) -> None:
        self._abandoned.set()

    def join(self, *, timeout_s: float) -> None:
        self._thread.join(timeout=timeout_s)

    def _run(self) -> None:
        try:
            if (backend := self._greet()) is not None:
                block_bytes = self._receiver.windows.block_bytes
                group = Group(self._store, RECEIVER, backend, self._host, block_bytes)
                try:
                    self._receive(group)
                finally:
                    group.abort()
        except Unavailable as error:
            self._log.warning("kv_pairing_failed", reason=error.message)
        except (ValueError, UnicodeDecodeError) as error:
            self._receiver.rejected(str(error))
        except RuntimeError as error:  # the group's only way to say that the other rank is gone
            if not self._abandoned.is_set():
                self._log.info("kv_pair_ended", reason=first_line(error))
        finally:
            del self._store  # stops listening

    def _greet(self) -> str | None:
        """The backend of the writer that showed a valid ticket; None where none came in time."""
        deadline_s = time.monotonic() + _PAIRING_TIMEOUT_S
        for knock in itertools.count(1):
            hello_key = f"hello/{knock}"
            while True:
                if time.monotonic() > deadline_s or self._abandoned.wait(_LOOK_S):
                    return None
                if self._store.check([hello_key]):
                    break
            backend, _, hello = self._store.get(hello_key)[:MAX_HELLO_BYTES].partition(b"\n")
            try:
                if self._receiver.check(hello) != self._writer:
                    raise Forbidden(f"this store is for {self._writer}")
                if backend not in (b"gloo", b"nccl"):
                    raise Forbidden("no such backend")
            except Forbidden as error:
                self._store.set(f"answer/{knock}", error.message)
                continue
            self._store.set(f"answer/{knock}", "")
            return backend.decode()
        return None

    def _receive(self, group: Group) -> None:
        works = [group.receive(slot) for slot in range(NUM_SLOTS)]
        for slot in itertools.cycle(range(NUM_SLOTS)):
            works[slot].wait(timedelta(seconds=_SILENCE_S))
            if self._abandoned.is_set():
                return
            self._land(group.message(slot))
            works[slot] = group.receive(slot)

    def _land(self, message: Blocks) -> None:
        windows = self._receiver.windows
        magic, attempt, index, offset, length, id_bytes = _HEAD.unpack_from(message.data)
        if magic != _HEAD_MAGIC or length > windows.block_bytes:
            raise ValueError("not a piece of a block")
        if length == 0:
            return  # a beat
        request_id = bytes(message[_HEAD.size : _HEAD.size + id_bytes]).decode()
        transfer = TransferId(request_id=request_id, attempt=attempt)
        with windows.place(transfer, index, offset, length) as place:
            if place is not None:
                place[:] = message[HEAD_BYTES : HEAD_BYTES + length].data
        windows.landed(transfer, index, offset, length)


class CollectiveSender:
    """The sending end of one pair. Copies each piece into a slot; up to four are on their way."""

    name = NAME

    def __init__(
        self,
        offer: TransportOffer,
        me: WorkerRef,
        peer: WorkerRef,
        tickets: Tickets,
        *,
        write_timeout_s: float = _WRITE_TIMEOUT_S,
    ) -> None:
        """Pairs. Raises Unavailable where the peer is not there or does not let us in."""
        self._timeout = timedelta(seconds=write_timeout_s)
        backend, _, block_bytes = offer.payload.decode().partition(":")
        if backend == "nccl" and best_backend() != "nccl":
            raise Unavailable("the peer's group is of GPUs, and there is none here")
        host, _, port = offer.address.rpartition(":")
        try:
            self._block_bytes = int(block_bytes)
            store = TCPStore(
                host,
                int(port),
                is_master=False,
                timeout=timedelta(seconds=_STORE_TIMEOUT_S),
                wait_for_workers=False,
            )
            knock = store.add(_KNOCKS, 1)
            store.set(f"hello/{knock}", f"{backend}\n" + make_hello(tickets, me, peer).decode())
            refusal = store.get(f"answer/{knock}")
        except (RuntimeError, ValueError) as error:
            raise Unavailable(f"no answer at {offer.address}: {first_line(error)}") from error
        if refusal:
            raise Unavailable(f"{peer} refused: {refusal.decode()}")
        self._group: Group | None = Group(store, SENDER, backend, host, self._block_bytes)
        self._slots = itertools.cycle(range(NUM_SLOTS))
        self._works: dict[int, dist.Work] = {}  # by slot, in the order in which they were sent
        self._lock = threading.Lock()  # the beat's thread sends too
        self._sent_s = time.monotonic()
        self._send(_BEAT, None)  # NCCL connects at the first message: here, not at a request's
        self.flush(timeout_s=GROUP_TIMEOUT_S)
        self._closed = threading.Event()
        self._beating = threading.Thread(target=self._beat, name=f"kv-to-{peer.name}", daemon=True)
        self._beating.start()

    def write(
        self, transfer: TransferId, index: int, target: int, offset: int, data: Blocks
    ) -> None:
        """Sends `data`, uint8 [n], as prompt block `index` from byte `offset`. Blocks.

        Raises Unavailable; the pair is of no more use then.
        """
        request_id = transfer.request_id.encode()
        if len(request_id) > HEAD_BYTES - _HEAD.size or data.nbytes > self._block_bytes:
            raise Unavailable("the piece does not fit a message of this pair")
        head = _HEAD.pack(
            _HEAD_MAGIC, transfer.attempt, index, offset, data.nbytes, len(request_id)
        )
        with self._lock:
            self._send(head + request_id, data)

    def flush(self, *, timeout_s: float) -> None:
        """Waits until every message has left. Raises Unavailable where one does not in time."""
        deadline_s = time.monotonic() + timeout_s
        with self._lock:
            while self._works:
                left = timedelta(seconds=deadline_s - time.monotonic())
                self._finish(next(iter(self._works)), left)
            if self._group is None:  # the beat's thread may have been the one to notice
                raise Unavailable("the pair was lost")

    def close(self) -> None:
        """Ends the pair, within seconds; messages that have left still arrive. Idempotent."""
        self._closed.set()
        self._beating.join(timeout=_BEAT_S)
        if not self._beating.is_alive():  # else the peer is frozen, and the beat waits for it
            with contextlib.suppress(Unavailable):
                self.flush(timeout_s=_BEAT_S)
        self._group = None

    def _send(self, head: bytes, data: Blocks | None) -> None:
        slot = next(self._slots)
        if slot in self._works:
            self._finish(slot, self._timeout)
        if self._group is None:
            raise Unavailable("the pair was closed")
        try:
            self._works[slot] = self._group.send(slot, self._group.fill(slot, head, data))
        except RuntimeError as error:
            raise self._lost(error) from error
        self._sent_s = time.monotonic()

    def _finish(self, slot: int, timeout: timedelta) -> None:
        try:
            self._works.pop(slot).wait(max(timeout, timedelta(milliseconds=1)))  # 0: for ever
        except RuntimeError as error:
            raise self._lost(error) from error

    def _lost(self, error: RuntimeError) -> Unavailable:
        if self._group is not None:
            self._group.abort()
        self._group = None
        self._works.clear()
        return Unavailable(f"the pair was lost: {first_line(error)}")

    def _beat(self) -> None:
        while not self._closed.wait(_BEAT_S):
            with self._lock:
                if time.monotonic() - self._sent_s < _BEAT_S:
                    continue
                try:
                    self._send(_BEAT, None)
                except Unavailable:
                    return  # the next write says so
