"""The `tcp` transport: pieces of blocks as frames over one connection per pair of workers.

The sender opens the connection with a hello (`kv_transfer.hello`) behind a magic number and its
length, and waits for one byte of welcome. Then each piece is a frame: a fixed header (magic,
attempt, block index, byte offset in the block, payload length, length of the request id), the
request id, the payload. The receiver reads payloads straight into its pool, at the block that its
own window names for the index, so that a frame of a transfer that is closed, unknown or of another
attempt is read and dropped: after `revoke` nothing of it can land, and no proof from the sender is
needed. Integers are little-endian.
"""

import contextlib
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence

import structlog

from core.errors import ConfigError, Forbidden, Unavailable
from core.messages import TransferId, TransportOffer, WorkerRef
from core.tickets import Tickets
from kv_transfer.digest import Blocks
from kv_transfer.hello import MAX_HELLO_BYTES, check_hello, make_hello
from kv_transfer.windows import Windows

NAME = "tcp"
_OPENING = struct.Struct("<8sH")
_OPENING_MAGIC = b"TNDMTCP2"
_WELCOME = b"\x01"
_FRAME = struct.Struct("<4sIIIIH")
_FRAME_MAGIC = b"KVBK"
_MAX_REQUEST_ID_BYTES = 256
_RECV_BYTES = 1 << 20  # one recv holds the pool's lock at most this long: about 0.4 ms
_TURN_BYTES = 8 << 20  # read from one connection before the others have their turn
_CONNECT_TIMEOUT_S = 5.0
_WRITE_TIMEOUT_S = 10.0
_HELLO_TIMEOUT_S = 5.0


class _Frames:
    """One connection's parser. Resumes at any byte boundary; owns no thread."""

    def __init__(
        self, receiver: "TcpReceiver", connection: socket.socket, scratch: memoryview
    ) -> None:
        self._receiver = receiver
        self._connection = connection
        self._windows = receiver.windows
        self._scratch = scratch  # where payloads go that are not wanted
        self.knocked_s = time.monotonic()
        self.welcome = False
        self._parse: Callable[[bytes], int] = self._opening
        self._head = memoryview(bytearray(MAX_HELLO_BYTES))
        self._have, self._need = 0, _OPENING.size
        self._transfer = TransferId(request_id="", attempt=0)
        self._fixed = (0, 0, 0, 0)  # attempt, index, offset, length
        self._remaining = 0  # bytes of the payload that have not come

    def take(self) -> bool:
        """Reads what is there; False at the end of the connection.

        Raises ValueError on rubbish, Forbidden without a valid ticket.
        """
        taken = 0
        while taken < _TURN_BYTES:
            wanted, count = self._payload() if self._remaining else self._next()
            if count == 0:
                return False
            taken += count
            if count < wanted:
                break  # most likely nothing more is there; select says it for less than a recv
        return True

    def _next(self) -> tuple[int, int]:
        wanted = self._need - self._have
        count = self._connection.recv_into(self._head[self._have : self._need], wanted)
        self._have += count
        if self._have == self._need:
            self._have, self._need = 0, self._parse(bytes(self._head[: self._need]))
        return wanted, count

    def _opening(self, head: bytes) -> int:
        magic, hello_bytes = _OPENING.unpack(head)
        if magic != _OPENING_MAGIC or not 0 < hello_bytes <= MAX_HELLO_BYTES:
            raise ValueError("not the opening of a connection")
        self._parse = self._hello
        return int(hello_bytes)

    def _hello(self, head: bytes) -> int:
        self._receiver.check(head)
        self.welcome = True
        self._connection.sendall(_WELCOME)
        self._parse = self._frame
        return _FRAME.size

    def _frame(self, head: bytes) -> int:
        magic, *fixed, id_bytes = _FRAME.unpack(head)
        attempt, index, offset, length = fixed
        if magic != _FRAME_MAGIC or not 0 < id_bytes <= _MAX_REQUEST_ID_BYTES:
            raise ValueError("not a frame")
        if not 0 < length <= self._windows.block_bytes - offset:
            raise ValueError(
                f"a frame of {length} bytes at {offset}; blocks have {self._windows.block_bytes}"
            )
        self._fixed = (attempt, index, offset, length)
        self._parse = self._request_id
        return int(id_bytes)

    def _request_id(self, head: bytes) -> int:
        self._transfer = TransferId(request_id=head.decode(), attempt=self._fixed[0])
        self._remaining = self._fixed[3]
        self._parse = self._frame
        return _FRAME.size

    def _payload(self) -> tuple[int, int]:
        _, index, offset, length = self._fixed
        wanted = min(self._remaining, _RECV_BYTES)
        at = offset + length - self._remaining
        with self._windows.place(self._transfer, index, at, wanted) as place:
            count = self._connection.recv_into(self._scratch if place is None else place, wanted)
        self._remaining -= count
        if count and self._remaining == 0:
            self._windows.landed(self._transfer, index, offset, length)
        return wanted, count


class TcpReceiver:
    """The receiving end of a worker, for all its peers. One thread reads all connections."""

    name = NAME

    def __init__(self, pool: Blocks, me: WorkerRef, host: str, tickets: Tickets) -> None:
        """Listens at once on a free port of `host`. `pool` is uint8 [num_blocks, block_bytes].

        Raises ConfigError where it cannot.
        """
        self.windows = Windows(pool)
        self._me = me
        self._tickets = tickets
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, 0), family=family)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(f"cannot listen on {host!r} (transfer.tcp_host): {reason}") from error
        self._listener.setblocking(False)
        self._address = "{}:{}".format(*self._listener.getsockname()[:2])
        self._wake, self._woken = socket.socketpair()
        self._log = structlog.get_logger()
        self._num_rejected = 0
        self._num_forbidden = 0
        self._thread = threading.Thread(target=self._serve, name="kv-tcp-receive", daemon=True)
        self._thread.start()

    def offer(self, writer: WorkerRef) -> TransportOffer:
        """The address; a writer shows its own ticket there."""
        return TransportOffer(name=NAME, address=self._address)

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
        """Since the start: frames and bytes, and connections closed for what they sent."""
        return {
            **self.windows.counters(),
            "rejected_connections": self._num_rejected,
            "forbidden_tickets": self._num_forbidden,
        }

    def check(self, hello: bytes) -> None:
        """Raises Forbidden where the hello's ticket does not let its writer in."""
        check_hello(self._tickets, self._me, hello)

    def close(self) -> None:
        """Closes every connection and ends the thread. Idempotent."""
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        self._thread.join(timeout=5)
        self._wake.close()

    def _serve(self) -> None:
        scratch = memoryview(bytearray(_RECV_BYTES))
        strangers: set[socket.socket] = set()  # connections that have not shown a ticket
        with selectors.DefaultSelector() as selector:

            def drop(connection: socket.socket) -> None:
                strangers.discard(connection)
                selector.unregister(connection)
                connection.close()

            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select(timeout=1.0 if strangers else None):
                    connection, frames = key.fileobj, key.data
                    assert isinstance(connection, socket.socket)
                    if connection is self._woken:
                        for other in list(selector.get_map().values()):
                            drop(other.fileobj)  # type: ignore[arg-type]
                        return
                    if connection is self._listener:
                        strangers |= self._accept(selector, scratch)
                    elif not self._read(frames):
                        drop(connection)
                    elif frames.welcome:
                        strangers.discard(connection)
                for connection in list(strangers):
                    knocked_s = selector.get_key(connection).data.knocked_s
                    if time.monotonic() - knocked_s > _HELLO_TIMEOUT_S:
                        self._num_rejected += 1
                        drop(connection)

    def _accept(self, selector: selectors.BaseSelector, scratch: memoryview) -> set[socket.socket]:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the peer left between its knock and our opening
            return set()
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ, _Frames(self, connection, scratch))
        return {connection}

    def _read(self, frames: _Frames) -> bool:
        try:
            return frames.take()
        except BlockingIOError:
            return True
        except Forbidden as error:
            self._num_forbidden += 1
            reason = error.message
        except (OSError, ValueError) as error:
            self._num_rejected += 1
            reason = str(error)
        self._log.warning("kv_connection_closed", transport=NAME, reason=reason)
        return False


class TcpSender:
    """The sending end of one pair."""

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
        """Connects. Raises Unavailable where the peer cannot be reached."""
        self._write_timeout_s = write_timeout_s
        host, _, port = offer.address.rpartition(":")
        hello = make_hello(tickets, me, peer)
        try:
            self._socket = socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S)
        except (OSError, ValueError) as error:
            raise Unavailable(f"cannot connect to {peer} at {offer.address}: {error}") from error
        try:
            # Buffer sizes are left to the kernel: fixed ones of 4 MiB measured a third slower.
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.sendall(_OPENING.pack(_OPENING_MAGIC, len(hello)) + hello)
            if self._socket.recv(1) != _WELCOME:
                raise OSError("it does not let us in")
            # The kernel waits, not Python: one call per piece instead of one per buffer's worth.
            seconds, rest = divmod(write_timeout_s, 1)
            timeout = struct.pack("@ll", int(seconds), int(rest * 1e6))
            self._socket.settimeout(None)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        except OSError as error:
            self._socket.close()
            raise Unavailable(f"cannot connect to {peer} at {offer.address}: {error}") from error

    def write(
        self, transfer: TransferId, index: int, target: int, offset: int, data: Blocks
    ) -> None:
        """Sends `data`, uint8 [n], as prompt block `index` from byte `offset`. Blocks.

        Raises Unavailable; the connection is of no more use then.
        """
        request_id = transfer.request_id.encode()
        head = _FRAME.pack(
            _FRAME_MAGIC, transfer.attempt, index, offset, data.nbytes, len(request_id)
        )
        deadline_s = time.monotonic() + self._write_timeout_s
        try:
            sent = self._socket.sendmsg((head, request_id, data.data))
            if sent < len(head) + len(request_id):
                raise OSError("the send buffer has no room for a frame's header")
            sent -= len(head) + len(request_id)
            while sent < data.nbytes:
                if time.monotonic() > deadline_s:
                    raise OSError(f"the peer read too slowly for {self._write_timeout_s} s")
                sent += self._socket.send(data.data[sent:])
        except OSError as error:
            self._socket.close()
            raise Unavailable("the KV connection was lost") from error

    def flush(self, *, timeout_s: float) -> None:
        """At once: a write that has returned has copied its bytes into the kernel."""

    def close(self) -> None:
        """Closes the connection; frames already sent still arrive. Idempotent."""
        self._socket.close()
