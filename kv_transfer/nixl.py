"""The `nixl` transport: one-sided writes by NVIDIA's NIXL over UCX, RDMA where there is hardware.

The receiver's offer holds the address of its agent and nothing more. A writer sends a hello
(`kv_transfer.hello`) there; for a valid ticket it is granted the keys of the pool and a token that
its notifications carry. It then writes into the pool itself and notifies for each piece, and the
receiver counts the notified bytes. Since the writer writes, revoking proves nothing: the proof is a
flush that succeeded, or the end of the writer, which the receiver sees on the same host alone
(`kv_transfer.liveness`). API: https://github.com/ai-dynamo/nixl/blob/main/docs/python_api.md
"""

import collections
import contextlib
import ipaddress
import os
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from core.errors import ConfigError, Forbidden, Unavailable
from core.messages import TransferId, TransportOffer, WorkerRef
from core.tickets import Tickets
from kv_transfer import liveness
from kv_transfer.digest import Blocks
from kv_transfer.hello import check_hello, make_hello
from kv_transfer.nixl_agent import start_agent
from kv_transfer.windows import Windows

NAME = "nixl"
_HELLO, _GRANT, _WRITTEN = b"H", b"G", b"W"
_HELLO_HEAD = struct.Struct("<cHB")  # length of the hello, whether the writer is marked
_GRANT_HEAD = struct.Struct("<c16sQQ")  # token, the pool's address, bytes of a block
_WRITTEN_HEAD = struct.Struct("<c16sIIII")  # token, attempt, index, offset, length
_GRANT_TIMEOUT_S = 3.0
_WRITE_TIMEOUT_S = 10.0
_MAX_IN_FLIGHT = 4
_MAX_REGISTERED = 8
_IDLE_POLL_S = 0.005
_BUSY_POLL_S = 0.00005
_SPINS = 200  # looks without a pause after the last notification


class NixlReceiver:
    """The receiving end of a worker. One thread makes UCX move and reads the notifications."""

    name = NAME

    def __init__(self, pool: Blocks, me: WorkerRef, host: str, tickets: Tickets) -> None:
        """`pool` is uint8 [num_blocks, block_bytes]. Raises ConfigError where NIXL does not run."""
        self._windows = Windows(pool)
        self._pool = pool
        self._me = me
        self._tickets = tickets
        try:
            loopback = ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
            self._agent = start_agent(me, loopback=loopback)
        except (Unavailable, OSError) as error:
            raise ConfigError(f"transfer.transport = 'nixl': {error}") from error
        # Taken before any memory is registered, so that it grants none.
        self._address = bytes([loopback]) + self._agent.get_agent_metadata()
        region = (pool.ctypes.data, pool.nbytes, 0, "")
        self._registered = self._agent.register_memory([region], "DRAM")
        self._keys: bytes = self._agent.get_agent_metadata()
        self._beside, self._lock_file = liveness.create_owned(me)
        self._tokens: dict[bytes, WorkerRef] = {}
        self._unmarked: set[WorkerRef] = set()  # writers whose end cannot be seen from here
        self._agents: dict[WorkerRef, list[str]] = {}
        self._gone: queue.SimpleQueue[WorkerRef] = queue.SimpleQueue()
        self._looks = liveness.SecondLook(self._beside)
        self._num_forbidden = 0
        self._num_rejected = 0
        self._log = structlog.get_logger().bind(transport=NAME)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="kv-nixl-receive", daemon=True)
        self._thread.start()

    def offer(self, writer: WorkerRef) -> TransportOffer:
        """The agent's address without the pool's keys, and where a writer marks itself."""
        return TransportOffer(name=NAME, address=str(self._beside), payload=self._address)

    def open(self, transfer: TransferId, block_ids: Sequence[int]) -> None:
        """Counts what comes for prompt block i, which is `block_ids[i]`, until `revoke`."""
        self._windows.open(transfer, block_ids)

    async def arrived(self, transfer: TransferId, *, timeout_s: float) -> bool:
        """Waits until every byte of the window has come; False where the time ran out first."""
        return await self._windows.arrived(transfer, timeout_s=timeout_s)

    def revoke(self, transfer: TransferId) -> bool:
        """False: what a writer has begun lands, whether it is counted or not."""
        self._windows.close(transfer)
        return False

    def is_dead(self, writer: WorkerRef) -> bool:
        """Whether this writer can write no more, and what it wrote is out of every buffer.

        Seen on the same host alone: a writer elsewhere must be fenced by its own supervisor.
        """
        if writer in self._unmarked:
            return False
        if not self._looks.is_gone(writer) or not liveness.streams_are_read():
            return False
        self._looks.forget(writer)
        self._gone.put(writer)
        return True

    def counters(self) -> dict[str, int]:
        """Since the start: notified pieces and bytes, and what was refused."""
        return {
            **self._windows.counters(),
            "rejected_connections": self._num_rejected,
            "forbidden_tickets": self._num_forbidden,
        }

    def close(self) -> None:
        """Ends the thread and takes the pool's keys back. Idempotent."""
        self._closed.set()
        self._thread.join(timeout=5)
        liveness.unlink_owned(self._beside)
        if self._lock_file >= 0:
            os.close(self._lock_file)
            self._lock_file = -1
        if not self._thread.is_alive() and self._agent is not None:
            self._agent.deregister_memory(self._registered)
            self._agent = None

    def _serve(self) -> None:
        idle = 0
        while not self._closed.is_set():
            notifications = self._agent.get_new_notifs()
            for notification in (n for sent in notifications.values() for n in sent):
                try:
                    self._take(notification)
                except Forbidden as error:
                    self._num_forbidden += 1
                    self._log.warning("kv_ticket_refused", reason=error.message)
                except Exception as error:  # NIXL's share no base class, and rubbish is anybody's
                    self._num_rejected += 1
                    self._log.warning("kv_notification_refused", reason=str(error))
            self._forget()
            idle = 0 if notifications else idle + 1
            if not self._windows.any_open:
                self._closed.wait(_IDLE_POLL_S)
            elif idle > _SPINS:
                time.sleep(_BUSY_POLL_S)

    def _take(self, notification: bytes) -> None:
        if notification[:1] == _WRITTEN:
            _, token, attempt, index, offset, length = _WRITTEN_HEAD.unpack_from(notification)
            if token not in self._tokens:
                raise ValueError("a notification without a token that was granted")
            request_id = notification[_WRITTEN_HEAD.size :].decode()
            transfer = TransferId(request_id=request_id, attempt=attempt)
            self._windows.landed(transfer, index, offset, length)
        elif notification[:1] == _HELLO:
            _, hello_bytes, marked = _HELLO_HEAD.unpack_from(notification)
            body = notification[_HELLO_HEAD.size :]
            writer = check_hello(self._tickets, self._me, body[:hello_bytes])
            self._grant(writer, address=body[hello_bytes:], marked=bool(marked))
        else:
            raise ValueError("no such notification")

    def _grant(self, writer: WorkerRef, *, address: bytes, marked: bool) -> None:
        agent = self._agent.add_remote_agent(address).decode()
        if not marked:
            self._unmarked.add(writer)
        token = secrets.token_bytes(16)
        self._tokens[token] = writer
        self._agents.setdefault(writer, []).append(agent)
        head = _GRANT_HEAD.pack(_GRANT, token, self._pool.ctypes.data, self._windows.block_bytes)
        self._agent.send_notif(agent, head + self._keys)

    def _forget(self) -> None:
        """Drops what is known of writers that were proven gone."""
        with contextlib.suppress(queue.Empty):
            while True:
                writer = self._gone.get_nowait()
                self._tokens = {t: w for t, w in self._tokens.items() if w != writer}
                for agent in self._agents.pop(writer, ()):
                    with contextlib.suppress(Exception):  # it may be down already
                        self._agent.remove_remote_agent(agent)


class NixlSender:
    """The sending end of one pair. A few writes are on their way at once."""

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
        """Pairs. Raises Unavailable where the peer does not grant us its pool."""
        self._write_timeout_s = write_timeout_s
        self._marker: liveness.Marker | None = None
        beside = Path(offer.address)
        if beside.exists():  # its random name is on this host alone
            self._marker = liveness.Marker(beside, me)
        try:
            loopback = offer.payload[:1] == b"\x01"
            self._agent = start_agent(me, loopback=loopback)
            self._in_flight: collections.deque[tuple[Any, float]] = collections.deque()
            self._registered: dict[tuple[int, int], tuple[Any, Any]] = {}
            self._lost: str | None = None
            try:
                self._pair(offer.payload[1:], make_hello(tickets, me, peer))
            except Unavailable:
                raise
            except Exception as error:  # NIXL's share no base class
                raise Unavailable(f"cannot reach the agent of {peer}: {error}") from error
        except Unavailable:
            if self._marker is not None:
                self._marker.close()
            raise

    def _pair(self, address: bytes, hello: bytes) -> None:
        self._peer = self._agent.add_remote_agent(address).decode()
        head = _HELLO_HEAD.pack(_HELLO, len(hello), self._marker is not None)
        self._agent.send_notif(self._peer, head + hello + self._agent.get_agent_metadata())
        deadline_s = time.monotonic() + _GRANT_TIMEOUT_S
        while time.monotonic() < deadline_s:
            for notification in self._agent.get_new_notifs().get(self._peer, ()):
                if notification[:1] == _GRANT:
                    _, self._token, self._base, self._block_bytes = _GRANT_HEAD.unpack_from(
                        notification
                    )
                    self._agent.add_remote_agent(notification[_GRANT_HEAD.size :])
                    return
            time.sleep(_BUSY_POLL_S)
        raise Unavailable(f"no grant within {_GRANT_TIMEOUT_S} s")

    def write(
        self, transfer: TransferId, index: int, target: int, offset: int, data: Blocks
    ) -> None:
        """Writes `data`, uint8 [n], to byte `offset` of the receiver's block `target`.

        Blocks while as many as may be are on their way. Raises Unavailable; some of the writes on
        their way may still land then, until this process is dead or `close` has returned.
        """
        head = _WRITTEN_HEAD.pack(
            _WRITTEN, self._token, transfer.attempt, index, offset, data.nbytes
        )
        place = self._base + target * self._block_bytes + offset
        while len(self._in_flight) >= _MAX_IN_FLIGHT:
            self._finish_oldest(self._in_flight[0][1])
        self._check_usable()
        try:
            self._register(data)
            source = self._agent.get_xfer_descs([(data.ctypes.data, data.nbytes, 0)], "DRAM")
            sink = self._agent.get_xfer_descs([(place, data.nbytes, 0)], "DRAM")
            note = head + transfer.request_id.encode()
            handle = self._agent.initialize_xfer("WRITE", source, sink, self._peer, note)
            state = self._agent.transfer(handle)
        except Exception as error:  # NIXL's share no base class
            raise self._broken(str(error)) from error
        self._in_flight.append((handle, time.monotonic() + self._write_timeout_s))
        if state == "ERR":
            raise self._broken("a write failed")

    def flush(self, *, timeout_s: float) -> None:
        """Waits until every write has landed. Raises Unavailable where one does not in time."""
        deadline_s = time.monotonic() + timeout_s
        while self._in_flight:
            self._finish_oldest(deadline_s)
        self._check_usable()

    def close(self) -> None:
        """Gives up what is on its way, ends the connection, and says so. Idempotent."""
        self._lost = self._lost or "it was closed"
        while self._in_flight:
            handle, _ = self._in_flight.popleft()
            with contextlib.suppress(Exception):  # it is given up with the agent
                handle.release()
        self._registered.clear()
        self._agent = None  # closes its connections
        if self._marker is not None:
            self._marker.close()

    def _register(self, data: Blocks) -> None:
        """Registers the array that `data` is a view of: the pool, once and for all."""
        whole = data
        while isinstance(whole.base, np.ndarray):
            whole = whole.base
        region = (whole.ctypes.data, whole.nbytes)
        if region in self._registered:
            return
        if len(self._registered) >= _MAX_REGISTERED:
            while self._in_flight:
                self._finish_oldest(self._in_flight[0][1])
            for _, registered in self._registered.values():
                self._agent.deregister_memory(registered)
            self._registered.clear()
        registered = self._agent.register_memory([(*region, 0, "")], "DRAM")
        self._registered[region] = (whole, registered)

    def _finish_oldest(self, deadline_s: float) -> None:
        handle, _ = self._in_flight[0]
        try:
            state = self._agent.check_xfer_state(handle)
            while state == "PROC":
                if time.monotonic() > deadline_s:
                    raise TimeoutError("a write did not end in time")
                time.sleep(_BUSY_POLL_S)
                state = self._agent.check_xfer_state(handle)
            if state != "DONE":
                raise RuntimeError("a write failed")
            handle.release()
        except Exception as error:  # NIXL's share no base class
            raise self._broken(str(error)) from error
        self._in_flight.popleft()

    def _check_usable(self) -> None:
        if self._lost is not None:
            raise Unavailable(f"the pair was lost: {self._lost}")

    def _broken(self, reason: str) -> Unavailable:
        self._lost = self._lost or reason
        return Unavailable(f"the pair was lost: {self._lost}")
