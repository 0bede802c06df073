"""Peers of the transports under test, as processes of their own."""

import contextlib
import importlib.util
import json
import os
import secrets
import select
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from bench.redis_server import BINARY, redis_server
from core import errors
from core.config import TransferConfig
from core.messages import TransportOffer, WorkerRef
from core.tickets import Tickets
from kv_transfer import shm
from kv_transfer.transport import make_receivers

ROOT = Path(__file__).parents[2]
NUM_BLOCKS, BLOCK_BYTES = 8, 1_500_001  # odd, and larger than one socket read
DECODE = WorkerRef(name="decode-t", incarnation=secrets.token_hex(4))
PREFILL = WorkerRef(name="prefill-t", incarnation=secrets.token_hex(4))
SECRET = secrets.token_bytes(32)
# What stands behind each name: the transport, and the faults its sender is wrapped with.
WRAPPED = {"faulty-shm": ("shm", "seed=1"), "faulty-tcp": ("tcp", "seed=1")}


def has_nixl():
    return any(importlib.util.find_spec(name) for name in ("nixl", "nixl_cu12", "nixl_cu13"))


class PeerProcess:
    """Runs peer.py; each method call is one operation there."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("peer.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
        self._num_senders = 0

    def call(self, operation, *, limit_s=40, **arguments):
        self.process.stdin.write(json.dumps([operation, arguments]).encode() + b"\n")
        self.process.stdin.flush()
        ready, _, _ = select.select([self.process.stdout], [], [], limit_s)
        assert ready, f"{operation} did not end within {limit_s} s"
        answer = json.loads(self.process.stdout.readline())
        if "error" in answer:
            raise getattr(errors, answer["error"])(answer["message"])
        return answer["result"]

    def connect(self, offers, *, me=PREFILL, peer=DECODE, secret=SECRET, **more):
        self._num_senders += 1
        offers = [
            {"name": o.name, "address": o.address, "payload": o.payload.hex()} for o in offers
        ]
        self.call(
            "connect",
            id=self._num_senders,
            offers=offers,
            me=[me.name, me.incarnation],
            peer=[peer.name, peer.incarnation],
            secret=secret.hex(),
            **more,
        )
        return RemoteSender(self, self._num_senders)

    def signal(self, number):
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait(timeout=10)

    def close(self):
        self.process.kill()
        self.process.wait(timeout=10)
        self.process.stdin.close()
        self.process.stdout.close()


class RemoteSender:
    def __init__(self, peer, id):
        self._peer, self.id = peer, id

    def job(self, transfer, index, target, seed, *, offset=0, size=BLOCK_BYTES):
        return {
            **{"id": self.id, "transfer": [transfer.request_id, transfer.attempt]},
            **{"index": index, "target": target, "seed": seed, "offset": offset},
            **{"size": size, "block_bytes": BLOCK_BYTES},
        }

    def write(self, *arguments, **pieces):
        self._peer.call("write", **self.job(*arguments, **pieces))

    def flush(self):
        self._peer.call("flush", id=self.id)

    def close(self):
        self._peer.call("close", id=self.id)


class Pair:
    """A receiver here with its pool, and the process in which its senders are."""

    me, writer, secret, block_bytes = DECODE, PREFILL, SECRET, BLOCK_BYTES

    def __init__(self, name, peer):
        self.transport, self.faults = WRAPPED.get(name, (name, ""))
        self.peer = peer
        self.segment = None
        if self.transport == "shm":
            self.segment = shm.Segment.create(DECODE, NUM_BLOCKS, BLOCK_BYTES)
            self.pool = self.segment.bytes
        else:
            self.pool = np.zeros((NUM_BLOCKS, BLOCK_BYTES), dtype=np.uint8)
        made = make_receivers(
            self.transport, DECODE, self.pool, self.segment, TransferConfig(), Tickets(SECRET)
        )
        self.receiver = made[self.transport]

    @staticmethod
    def data(*seeds):
        """What the peer writes for those seeds: uint8 [BLOCK_BYTES], or one row for each."""
        made = [np.random.default_rng(s).integers(0, 256, BLOCK_BYTES, np.uint8) for s in seeds]
        return made[0] if len(seeds) == 1 else np.stack(made)

    def sender(self, me=PREFILL, **more):
        offers = [self.receiver.offer(me)]
        return self.peer.connect(offers, me=me, faults=self.faults, **more)

    def close(self):
        self.receiver.close()
        self.receiver.close()
        del self.pool
        if self.segment is not None:
            self.segment.close()


@pytest.fixture(scope="session")
def shared_peer():
    """A peer that no test ends; starting one costs seconds where torch comes along."""
    peer = PeerProcess()
    yield peer
    peer.close()


@pytest.fixture
def new_peer():
    """Makes peers that the test may end."""
    with contextlib.ExitStack() as peers:

        def make():
            peer = PeerProcess()
            peers.callback(peer.close)
            return peer

        yield make


@pytest.fixture
def make_pair(shared_peer):
    """Makes pairs, by default with the shared peer."""
    with contextlib.ExitStack() as pairs:

        def make(name, peer=shared_peer):
            if WRAPPED.get(name, (name,))[0] == "nixl" and not has_nixl():
                pytest.skip("the nixl package is not installed")
            pair = Pair(name, peer)
            pairs.callback(pair.close)
            return pair

        yield make


def listening_ports():
    """Every TCP port on which this process listens, with its address."""
    ports = set()
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        if not os.path.exists(path) or not stat.S_ISSOCK(os.stat(path).st_mode):
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as duplicate:
            if duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                host, port = duplicate.getsockname()[:2]
                ports.add(("127.0.0.1" if host in ("0.0.0.0", "::") else host, port))
    return sorted(ports)


@pytest.fixture
def served(new_peer):
    """Serves in a new process, with all its blocks open to (request, 1); gives it and the offer."""

    def serve(transport):
        if transport == "nixl" and not has_nixl():
            pytest.skip("the nixl package is not installed")
        peer = new_peer()
        offer = peer.call(
            "serve",
            transport=transport,
            me=[DECODE.name, DECODE.incarnation],
            writer=[PREFILL.name, PREFILL.incarnation],
            secret=SECRET.hex(),
            num_blocks=NUM_BLOCKS,
            block_bytes=BLOCK_BYTES,
        )
        payload = bytes.fromhex(offer.pop("payload"))
        return peer, TransportOffer(**offer, payload=payload)

    return serve


@pytest.fixture
def rubbish():
    """Sends rubbish to every port on which this process listens; gives how many there were."""

    def send():
        ports = listening_ports()
        for address in ports:
            for words in (
                b"\x80\x04\x95" + bytes(100),
                b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(40),
                bytes(5000),
                b"\xff" * 5000,
                secrets.token_bytes(20_000),
            ):
                with (
                    contextlib.suppress(OSError),  # it may close with our bytes unread
                    socket.create_connection(address, timeout=5) as connection,
                ):
                    connection.sendall(words)
        return len(ports)

    return send


@pytest.fixture
def eventually():
    """Waits for what another process or thread brings about, and no event tells of."""

    def wait(condition, *, limit_s=10):
        end = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < end, f"not within {limit_s} s"
            time.sleep(0.01)

    return wait


@pytest.fixture(scope="module")
def redis():
    """A real Redis for the tests of one file."""
    if BINARY is None:
        pytest.skip("no redis-server on the path: apt-get install redis-server")
    with redis_server() as server:
        yield server
