"""The hello with which a writer shows its ticket."""

import json

import pytest

from core.errors import Forbidden
from core.messages import WorkerRef
from core.tickets import Claim, Right, Tickets
from kv_transfer.hello import MAX_HELLO_BYTES, check_hello, make_hello

SECRET = bytes(range(32))
WRITER = WorkerRef(name="prefill-0", incarnation="a")
RECEIVER = WorkerRef(name="decode-0", incarnation="b")


class Clock:
    now_s = 1000.0

    def __call__(self):
        return self.now_s


def test_a_valid_hello_names_its_writer():
    hello = make_hello(Tickets(SECRET), WRITER, RECEIVER)
    assert len(hello) <= MAX_HELLO_BYTES
    assert check_hello(Tickets(SECRET), RECEIVER, hello) == WRITER


@pytest.mark.parametrize(
    "receiver",
    [WorkerRef(name="decode-0", incarnation="c"), WorkerRef(name="decode-1", incarnation="b")],
)
def test_a_hello_for_another_receiver_or_another_life_is_void(receiver):
    hello = make_hello(Tickets(SECRET), WRITER, RECEIVER)
    with pytest.raises(Forbidden, match="is for decode-0/b"):
        check_hello(Tickets(SECRET), receiver, hello)


@pytest.mark.parametrize(
    "change",
    [
        {"writer": ["prefill-1", "a"]},
        {"writer": ["prefill-0", "b"]},
        {"expires_unix_s": 1e12},
        {"mac": bytes(32).hex()},
        {"mac": ""},
    ],
)
def test_a_changed_hello_is_void(change):
    fields = json.loads(make_hello(Tickets(SECRET), WRITER, RECEIVER))
    with pytest.raises(Forbidden):
        check_hello(Tickets(SECRET), RECEIVER, json.dumps(fields | change).encode())


def test_a_hello_ends():
    clock = Clock()
    hello = make_hello(Tickets(SECRET, clock), WRITER, RECEIVER)
    clock.now_s += 3600
    with pytest.raises(Forbidden, match="over"):
        check_hello(Tickets(SECRET, clock), RECEIVER, hello)


def test_the_schedulers_ticket_is_none_for_writing():
    tickets = Tickets(SECRET)
    other = tickets.sign(Claim(right=Right.HANDOFF, prefill=WRITER, decode=RECEIVER), lifetime_s=30)
    fields = json.loads(make_hello(tickets, WRITER, RECEIVER))
    fields |= {"mac": other.mac.hex(), "expires_unix_s": other.expires_unix_s}
    with pytest.raises(Forbidden):
        check_hello(tickets, RECEIVER, json.dumps(fields).encode())
