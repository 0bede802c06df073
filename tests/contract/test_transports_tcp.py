"""What tcp promises beyond the contract: its parser, at the level of bytes."""

import asyncio
import contextlib
import secrets
import socket

import numpy as np
import pytest

from core.errors import ConfigError, Unavailable
from core.messages import TransferId, TransportOffer, WorkerRef
from core.tickets import Tickets
from kv_transfer import tcp
from kv_transfer.hello import make_hello

TRANSFER = TransferId(request_id="request", attempt=1)


@pytest.fixture
def pair(make_pair):
    return make_pair("tcp")


@pytest.fixture
def raw(pair):
    """A connection to the receiver that says nothing by itself."""
    host, _, port = pair.receiver.offer(pair.writer).address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield connection


def opening(pair, secret=None):
    hello = make_hello(Tickets(secret or pair.secret), pair.writer, pair.me)
    return tcp._OPENING.pack(tcp._OPENING_MAGIC, len(hello)) + hello


def frame(pair, *, attempt=1, index=0, offset=0, length=None, request_id=b"request"):
    length = pair.block_bytes if length is None else length
    fixed = (tcp._FRAME_MAGIC, attempt, index, offset, length, len(request_id))
    return tcp._FRAME.pack(*fixed) + request_id


async def ends(connection):
    with contextlib.suppress(ConnectionResetError):  # it closed with our bytes unread
        while await asyncio.to_thread(connection.recv, 100):
            pass


async def test_frames_are_taken_up_again_at_any_byte(pair, raw):
    pair.receiver.open(TRANSFER, (2,))
    stream = opening(pair) + frame(pair) + pair.data(1).tobytes()
    head = len(stream) - pair.block_bytes + 10
    for i in range(head):
        raw.sendall(stream[i : i + 1])
    await asyncio.to_thread(raw.sendall, stream[head:])
    assert await pair.receiver.arrived(TRANSFER, timeout_s=10)
    assert np.array_equal(pair.pool[2], pair.data(1))


async def test_a_block_stopped_halfway_lands_nowhere_after_the_revocation(pair, raw, eventually):
    """The receiver's thread is inside a payload when the window closes."""
    receiver, later = pair.receiver, TransferId(request_id="later", attempt=1)
    stale, fresh = pair.data(1, 2)
    receiver.open(TRANSFER, (0,))
    raw.sendall(opening(pair) + frame(pair) + stale.tobytes()[:1000])
    await asyncio.to_thread(eventually, lambda: pair.pool[0, :1000].any())
    receiver.revoke(TRANSFER)
    receiver.open(later, (0,))
    sender = pair.sender()
    sender.write(later, 0, 0, seed=2)
    assert await receiver.arrived(later, timeout_s=10)
    raw.sendall(stale.tobytes()[1000:])
    third = TransferId(request_id="third", attempt=1)
    receiver.open(third, (1,))
    raw.sendall(frame(pair, request_id=b"third"))
    await asyncio.to_thread(raw.sendall, fresh.tobytes())
    assert await receiver.arrived(third, timeout_s=10)  # so the stale rest was read before
    assert np.array_equal(pair.pool[0], fresh)
    assert receiver.counters()["stale_frames"] == 1
    sender.close()


@pytest.mark.parametrize("kind", ["pickle", "http", "random", "no-hello", "long-hello"])
async def test_rubbish_closes_its_connection_alone(pair, raw, kind):
    raw.sendall(
        {
            "pickle": b"\x80\x04\x95" + bytes(100),
            "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(40),
            "random": secrets.token_bytes(10_000),
            "no-hello": tcp._OPENING.pack(tcp._OPENING_MAGIC, 0),
            "long-hello": tcp._OPENING.pack(tcp._OPENING_MAGIC, 65535),
        }[kind]
    )
    await ends(raw)
    assert pair.receiver.counters()["rejected_connections"] == 1
    pair.receiver.open(TRANSFER, (0,))
    sender = pair.sender()
    sender.write(TRANSFER, 0, 0, seed=1)
    assert await pair.receiver.arrived(TRANSFER, timeout_s=10)
    sender.close()


@pytest.mark.parametrize(
    "hello", [b"null", b"[]", b'"x"', b"{}", b'{"writer": [1]}', b"\xff\xfe", b'{"writer": "ab"}']
)
async def test_what_is_no_hello_is_forbidden(pair, raw, hello):
    raw.sendall(tcp._OPENING.pack(tcp._OPENING_MAGIC, len(hello)) + hello)
    await ends(raw)
    assert pair.receiver.counters()["forbidden_tickets"] == 1


async def test_no_frame_is_read_before_a_valid_hello(pair, raw):
    pair.receiver.open(TRANSFER, (0,))
    with contextlib.suppress(OSError):
        stream = opening(pair, secret=bytes(32)) + frame(pair) + pair.data(1).tobytes()
        await asyncio.to_thread(raw.sendall, stream)
    await ends(raw)
    assert pair.receiver.counters()["forbidden_tickets"] == 1
    assert not pair.pool.any()


@pytest.mark.parametrize(
    "bad",
    [
        {"length": 0},
        {"length": 2**31},
        {"offset": 1},
        {"offset": 2**32 - 1, "length": 1},
        {"request_id": b""},
        {"request_id": b"\xff\xfe"},
        {"request_id": bytes(257)},
    ],
    ids=lambda bad: "-".join(bad),
)
async def test_a_frame_that_cannot_be_is_refused(pair, raw, bad):
    pair.receiver.open(TRANSFER, (0,))
    with contextlib.suppress(OSError):
        raw.sendall(opening(pair) + frame(pair, **bad) + bytes(1000))
    await ends(raw)
    assert pair.receiver.counters()["rejected_connections"] == 1
    assert not pair.pool.any()


async def test_a_block_outside_the_window_lands_nowhere(pair):
    pair.receiver.open(TRANSFER, (5,))
    sender = pair.sender()
    sender.write(TRANSFER, 1, 6, seed=1)
    sender.write(TRANSFER, 0, 5, seed=2)
    assert await pair.receiver.arrived(TRANSFER, timeout_s=10)
    assert np.array_equal(pair.pool[5], pair.data(2))
    assert not pair.pool[6].any()
    sender.close()


async def test_who_connects_and_says_nothing_is_sent_away(pair, raw, monkeypatch):
    monkeypatch.setattr(tcp, "_HELLO_TIMEOUT_S", 0.1)
    await ends(raw)
    assert pair.receiver.counters()["rejected_connections"] == 1


def test_to_nobody_is_unavailable(pair):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    offer = TransportOffer(name="tcp", address=f"127.0.0.1:{port}")
    with pytest.raises(Unavailable, match="cannot connect"):
        tcp.TcpSender(offer, pair.writer, pair.me, Tickets(pair.secret))


def test_an_address_that_is_not_ours_is_a_clear_refusal():
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1.*transfer\.tcp_host"):
        tcp.TcpReceiver(
            np.zeros((1, 16), np.uint8),
            WorkerRef(name="d", incarnation="1"),
            "192.0.2.1",
            Tickets(bytes(32)),
        )
