"""What every transport promises. Real memory, real sockets, senders in a process of their own."""

import asyncio
import signal

import numpy as np
import pytest

from core.config import TransferConfig
from core.errors import ConfigError, Incompatible
from core.messages import TransferId, TransportOffer, WorkerRef
from core.tickets import Tickets
from kv_transfer import transport

ALL = ("shm", "tcp", "collective", "nixl", "faulty-shm", "faulty-tcp")
COUNTS_BYTES = ("tcp", "collective", "nixl", "faulty-tcp")
REVOKES = ("tcp", "collective", "faulty-tcp")  # to revoke is proof
WRITES_ITSELF = ("shm", "nixl", "faulty-shm")  # the sender writes into the receiver's memory
SHOWS_TICKET = ("tcp", "collective", "nixl")
TRANSFER = TransferId(request_id="request", attempt=1)
PIECE_BYTES = 1_000_000


@pytest.fixture(params=ALL)
def pair(request, make_pair):
    return make_pair(request.param)


@pytest.fixture
def named_pair(request, make_pair):
    """For tests that name their transports."""
    return make_pair(request.param)


def only(*names):
    return pytest.mark.parametrize("named_pair", names, indirect=True)


async def test_blocks_arrive_where_the_receiver_wants_them(pair):
    targets = (5, 0, 7)
    pair.receiver.open(TRANSFER, targets)
    sender = pair.sender()
    for index, target in enumerate(targets):
        sender.write(TRANSFER, index, target, seed=index)
    sender.flush()
    assert await pair.receiver.arrived(TRANSFER, timeout_s=10)
    assert np.array_equal(pair.pool[list(targets)], pair.data(0, 1, 2))
    assert not pair.pool[[1, 2, 3, 4, 6]].any()
    sender.close()


async def test_pieces_of_blocks_arrive_in_any_order(pair):
    """As layers are computed: the same layer of every block, then the next layer."""
    pair.receiver.open(TRANSFER, (6, 1))
    sender = pair.sender()
    third = pair.block_bytes // 3
    for offset, size in ((third, third), (0, third), (2 * third, pair.block_bytes - 2 * third)):
        for index, target in ((0, 6), (1, 1)):
            sender.write(TRANSFER, index, target, seed=index, offset=offset, size=size)
    sender.flush()
    assert await pair.receiver.arrived(TRANSFER, timeout_s=10)
    assert np.array_equal(pair.pool[[6, 1]], pair.data(0, 1))
    assert not pair.pool[[0, 2, 3, 4, 5, 7]].any()
    sender.close()


@only(*COUNTS_BYTES)
async def test_a_piece_that_comes_twice_counts_once(named_pair):
    half = named_pair.block_bytes // 2
    named_pair.receiver.open(TRANSFER, (2,))
    sender = named_pair.sender()
    for _ in range(2):
        sender.write(TRANSFER, 0, 2, seed=3, size=half)
    sender.flush()
    assert not await named_pair.receiver.arrived(TRANSFER, timeout_s=0.2)
    sender.write(TRANSFER, 0, 2, seed=3, offset=half, size=named_pair.block_bytes - half)
    sender.flush()
    assert await named_pair.receiver.arrived(TRANSFER, timeout_s=10)
    assert np.array_equal(named_pair.pool[2], named_pair.data(3))
    assert named_pair.receiver.counters()["bytes_received"] == named_pair.block_bytes
    assert named_pair.receiver.counters()["stale_frames"] == 1
    sender.close()


@only(*COUNTS_BYTES)
async def test_what_never_came_is_told_within_the_time(named_pair):
    named_pair.receiver.open(TRANSFER, (0, 1))
    sender = named_pair.sender()
    sender.write(TRANSFER, 0, 0, seed=1)
    sender.flush()
    assert not await named_pair.receiver.arrived(TRANSFER, timeout_s=0.1)
    sender.close()


async def test_two_senders_write_side_by_side(pair):
    other = TransferId(request_id="other", attempt=1)
    one, two = pair.sender(), pair.sender(WorkerRef(name="prefill-u", incarnation="1"))
    pair.receiver.open(TRANSFER, (1, 3))
    pair.receiver.open(other, (2, 4))
    errors = pair.peer.call(
        "write_at_once",
        jobs=[one.job(TRANSFER, 0, 1, 10), two.job(other, 0, 2, 11)],
    )
    errors += pair.peer.call(
        "write_at_once",
        jobs=[two.job(other, 1, 4, 13), one.job(TRANSFER, 1, 3, 12)],
    )
    assert errors == []
    assert await pair.receiver.arrived(TRANSFER, timeout_s=10)
    assert await pair.receiver.arrived(other, timeout_s=10)
    assert np.array_equal(pair.pool[1:5], pair.data(10, 11, 12, 13))
    one.close()
    two.close()


async def test_a_second_pairing_of_the_same_workers_works_beside_the_first_ones_end(pair):
    first = pair.sender()
    second = pair.sender()
    first.close()
    pair.receiver.open(TRANSFER, (4,))
    second.write(TRANSFER, 0, 4, seed=5)
    second.flush()
    assert await pair.receiver.arrived(TRANSFER, timeout_s=10)
    assert np.array_equal(pair.pool[4], pair.data(5))
    second.close()


async def test_to_revoke_is_proof_where_the_receiver_does_the_writing(pair, request):
    proof = request.node.callspec.params["pair"] in REVOKES
    pair.receiver.open(TRANSFER, (0,))
    assert pair.receiver.revoke(TRANSFER) is proof
    assert pair.receiver.revoke(TRANSFER) is proof


@only(*REVOKES)
async def test_pieces_after_the_revocation_change_nothing(named_pair):
    later = TransferId(request_id="later", attempt=1)
    sender = named_pair.sender()
    named_pair.receiver.open(TRANSFER, (0, 1))
    sender.write(TRANSFER, 0, 0, seed=1)
    assert named_pair.receiver.revoke(TRANSFER)
    named_pair.receiver.open(later, (0, 1))
    sender.write(later, 0, 0, seed=2)
    sender.write(TRANSFER, 0, 0, seed=1)
    sender.write(TRANSFER, 1, 1, seed=1)
    sender.write(later, 1, 1, seed=3)
    sender.flush()
    assert await named_pair.receiver.arrived(later, timeout_s=10)
    assert np.array_equal(named_pair.pool[:2], named_pair.data(2, 3))
    assert named_pair.receiver.counters()["stale_frames"] >= 2
    sender.close()


@only(*REVOKES)
async def test_an_earlier_attempt_writes_nothing(named_pair):
    second = TransferId(request_id=TRANSFER.request_id, attempt=2)
    named_pair.receiver.open(second, (3,))
    sender = named_pair.sender()
    sender.write(TRANSFER, 0, 3, seed=1)
    sender.write(second, 0, 3, seed=2)
    sender.flush()
    assert await named_pair.receiver.arrived(second, timeout_s=10)
    assert np.array_equal(named_pair.pool[3], named_pair.data(2))
    assert named_pair.receiver.counters()["stale_frames"] == 1
    sender.close()


@only("nixl")
async def test_an_earlier_attempts_bytes_do_not_count(named_pair):
    second = TransferId(request_id=TRANSFER.request_id, attempt=2)
    named_pair.receiver.open(second, (3,))
    sender = named_pair.sender()
    sender.write(TRANSFER, 0, 3, seed=1)
    sender.flush()
    assert not await named_pair.receiver.arrived(second, timeout_s=0.2)
    assert named_pair.receiver.counters()["stale_frames"] == 1
    sender.close()


@only(*SHOWS_TICKET)
@pytest.mark.parametrize("wrong", ["secret", "incarnation"])
async def test_a_writer_without_a_valid_ticket_is_refused_and_counted(
    named_pair, wrong, eventually
):
    """Another secret, or a ticket for an earlier life of the receiver."""
    earlier = WorkerRef(name=named_pair.me.name, incarnation="earlier")
    bad = {"secret": bytes(32)} if wrong == "secret" else {"peer": earlier}
    with pytest.raises(Incompatible):
        named_pair.sender(**bad)
    eventually(lambda: named_pair.receiver.counters()["forbidden_tickets"] == 1)
    named_pair.receiver.open(TRANSFER, (0,))
    sender = named_pair.sender()
    sender.write(TRANSFER, 0, 0, seed=1)
    sender.flush()
    assert await named_pair.receiver.arrived(TRANSFER, timeout_s=10)
    sender.close()


@pytest.mark.parametrize("name", ["tcp", "collective", "nixl"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_frozen_receiver_is_unavailable_and_no_hang(name, how, served, shared_peer):
    receiver, offer = served(name)
    sender = shared_peer.connect([offer], write_timeout_s=1.0)
    sender.write(TRANSFER, 0, 0, seed=1, size=PIECE_BYTES)
    receiver.signal(how)
    ended = shared_peer.call("write_until_lost", id=sender.id, block_bytes=PIECE_BYTES, for_s=20.0)
    assert ended["error"] == "Unavailable"
    assert ended["after_s"] < 4.0
    sender.close()


@pytest.mark.parametrize("name", REVOKES[:2])
def test_a_writer_that_dies_midway_leaves_the_receiver_working(
    name, make_pair, new_peer, shared_peer
):
    dying = new_peer()
    pair = make_pair(name, dying)
    pair.receiver.open(TRANSFER, (0, 1))
    pair.sender().write(TRANSFER, 0, 0, seed=1)
    dying.signal(signal.SIGKILL)
    assert not asyncio.run(pair.receiver.arrived(TRANSFER, timeout_s=0.2))
    assert pair.receiver.revoke(TRANSFER)
    pair.peer = shared_peer
    later = TransferId(request_id="later", attempt=1)
    pair.receiver.open(later, (0,))
    sender = pair.sender(WorkerRef(name="prefill-u", incarnation="2"))
    sender.write(later, 0, 0, seed=2)
    sender.flush()
    assert asyncio.run(pair.receiver.arrived(later, timeout_s=10))
    assert np.array_equal(pair.pool[0], pair.data(2))
    sender.close()


@pytest.mark.parametrize("name", ["shm", "nixl"])
def test_a_dead_writer_is_told_from_a_frozen_one(name, make_pair, new_peer, eventually):
    writer = new_peer()
    pair = make_pair(name, writer)
    sender = pair.sender()
    pair.receiver.open(TRANSFER, (0,))
    sender.write(TRANSFER, 0, 0, seed=1)
    for _ in range(3):
        assert not pair.receiver.is_dead(pair.writer)
    writer.signal(signal.SIGSTOP)
    for _ in range(3):
        assert not pair.receiver.is_dead(pair.writer)
    writer.signal(signal.SIGKILL)
    eventually(lambda: pair.receiver.is_dead(pair.writer))


@pytest.mark.parametrize("name", ["shm", "nixl"])
def test_a_writer_that_closed_can_write_no_more(name, make_pair, eventually):
    pair = make_pair(name)
    one, two = pair.sender(), pair.sender()
    one.close()
    for _ in range(3):
        assert not pair.receiver.is_dead(pair.writer)
    two.close()
    eventually(lambda: pair.receiver.is_dead(pair.writer))


async def test_rubbish_on_every_port_changes_nothing(pair, rubbish):
    """Before anybody has paired, and while somebody has."""
    early = pair.receiver.offer(pair.writer)
    listens = pair.transport != "shm"
    assert rubbish() >= listens
    sender = pair.peer.connect([early], faults=pair.faults)
    assert rubbish() >= listens + (pair.transport == "collective")  # the store, and the group
    pair.receiver.open(TRANSFER, (3,))
    sender.write(TRANSFER, 0, 3, seed=4)
    sender.flush()
    assert await pair.receiver.arrived(TRANSFER, timeout_s=10)
    assert np.array_equal(pair.pool[3], pair.data(4))
    assert not pair.pool[[0, 1, 2, 4, 5, 6, 7]].any()
    sender.close()


# --- the choice --------------------------------------------------------------------------------


def test_a_pair_without_a_common_transport_is_told_why(shared_peer):
    offers = [TransportOffer(name="carrier-pigeon", address="roof")]
    with pytest.raises(Incompatible, match="carrier-pigeon: unknown here"):
        shared_peer.connect(offers)


def test_the_first_offer_that_works_is_taken_and_the_fallback_counted(make_pair):
    pair = make_pair("tcp")
    gone = TransportOffer(name="shm", address="/dev/shm/tandem-none.kv")
    offers = [gone, pair.receiver.offer(pair.writer)]
    sender = transport.connect(offers, pair.writer, pair.me, Tickets(pair.secret))
    assert sender.name == "tcp"
    sender.write(TRANSFER, 0, 0, 0, pair.data(1))
    counters = sender.counters()
    assert counters["fallbacks"] == 1
    assert counters["bytes_sent"] == pair.block_bytes
    assert counters["busy_us"] > 0
    sender.close()


def test_auto_offers_shared_memory_first_where_there_is_some(make_pair):
    for name, expected in (("shm", ["shm", "tcp"]), ("tcp", ["tcp"])):
        pair = make_pair(name)
        made = transport.make_receivers(
            "auto", pair.me, pair.pool, pair.segment, TransferConfig(), Tickets(pair.secret)
        )
        assert list(made) == expected
        made["tcp"].close()


@pytest.mark.parametrize("wanted", ["shm", "cuda_ipc", "carrier-pigeon"])
def test_a_transport_that_cannot_be_had_is_a_configuration_error(make_pair, wanted):
    pair = make_pair("tcp")
    with pytest.raises(ConfigError, match=wanted):
        transport.make_receivers(
            wanted, pair.me, pair.pool, None, TransferConfig(), Tickets(pair.secret)
        )
