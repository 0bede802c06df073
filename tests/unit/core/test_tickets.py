"""A ticket is good for what it names, in these lives of these workers, for its time."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import ConfigError, Forbidden, StaleLeader
from core.fence import Fence
from core.messages import Ticket, TransferId, WorkerRef
from core.tickets import Claim, Right, Tickets, load_secret, secret_for_cluster, store_secret

SECRET = b"a secret of enough bytes"
CLAIM = Claim(
    right=Right.HANDOFF,
    prefill=WorkerRef(name="p", incarnation="1"),
    decode=WorkerRef(name="d", incarnation="2"),
    transfer=TransferId(request_id="r", attempt=1),
)


class Clock:
    now_s = 1_000_000.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def tickets(clock):
    return Tickets(SECRET, clock)


def test_a_ticket_is_good_for_its_claim(tickets):
    tickets.check(CLAIM, tickets.sign(CLAIM, lifetime_s=10))


@pytest.mark.parametrize(
    "other",
    [
        replace(CLAIM, right=Right.WRITE),
        replace(CLAIM, prefill=WorkerRef(name="p", incarnation="9")),
        replace(CLAIM, prefill=None),
        replace(CLAIM, decode=WorkerRef(name="d", incarnation="9")),
        replace(CLAIM, transfer=TransferId(request_id="r", attempt=2)),
        replace(CLAIM, transfer=TransferId(request_id="s", attempt=1)),
        replace(CLAIM, transfer=None),
    ],
    ids=["right", "prefill", "no-prefill", "decode", "attempt", "request", "no-transfer"],
)
def test_a_ticket_is_void_for_another_claim(tickets, other):
    with pytest.raises(Forbidden, match="not for this"):
        tickets.check(other, tickets.sign(CLAIM, lifetime_s=10))


def test_a_ticket_of_another_cluster_is_void(tickets, clock):
    foreign = Tickets(b"another secret of enough bytes", clock)
    with pytest.raises(Forbidden):
        tickets.check(CLAIM, foreign.sign(CLAIM, lifetime_s=10))


def test_a_ticket_ends(tickets, clock):
    ticket = tickets.sign(CLAIM, lifetime_s=10)
    clock.now_s += 41.0  # the lifetime, and what clocks may differ by
    with pytest.raises(Forbidden, match="over"):
        tickets.check(CLAIM, ticket)


def test_a_longer_life_cannot_be_written_into_a_ticket(tickets):
    ticket = tickets.sign(CLAIM, lifetime_s=10)
    with pytest.raises(Forbidden):
        tickets.check(CLAIM, Ticket(expires_unix_s=ticket.expires_unix_s + 1, mac=ticket.mac))


def test_no_ticket_is_no_right(tickets):
    with pytest.raises(Forbidden, match="no ticket"):
        tickets.check(CLAIM, None)


def test_a_ticket_to_read_the_prompt_oneself_is_void_with_a_prefill_worker(tickets):
    local = replace(CLAIM, prefill=None)
    ticket = tickets.sign(local, lifetime_s=10)
    tickets.check(local, ticket)
    with pytest.raises(Forbidden, match="not for this"):
        tickets.check(replace(CLAIM, prefill=WorkerRef(name="", incarnation="")), ticket)


def leader(token):
    """The tickets of a scheduler that leads under this token."""
    fence = Fence()
    fence.admit(token)
    return Tickets(SECRET, Clock(), fence=fence)


def test_a_worker_that_has_seen_a_later_leader_refuses_the_earlier_one_and_counts_it():
    fence = Fence()
    worker = Tickets(SECRET, Clock(), fence=fence)
    early, late = leader(3).sign(CLAIM, lifetime_s=10), leader(4).sign(CLAIM, lifetime_s=10)
    worker.check(CLAIM, early)
    worker.check(CLAIM, late)
    with pytest.raises(StaleLeader):
        worker.check(CLAIM, early)
    assert (fence.token, fence.num_refused) == (4, 1)


def test_a_higher_token_cannot_be_written_into_a_ticket():
    fence = Fence()
    ticket = leader(3).sign(CLAIM, lifetime_s=10)
    with pytest.raises(Forbidden):
        Tickets(SECRET, Clock(), fence=fence).check(CLAIM, replace(ticket, leader_token=4))
    assert fence.token == 0


def test_a_writers_ticket_is_no_leaders():
    fence = Fence()
    fence.admit(9)
    writing = replace(CLAIM, right=Right.WRITE)
    worker = Tickets(SECRET, Clock(), fence=fence)
    worker.check(writing, Tickets(SECRET, Clock()).sign(writing, lifetime_s=10))


WORDS = st.text(alphabet="02a", max_size=2)
WORKERS = st.builds(WorkerRef, name=WORDS, incarnation=WORDS)
TRANSFERS = st.builds(TransferId, request_id=WORDS, attempt=st.integers(0, 2))
CLAIMS = st.builds(
    Claim,
    right=st.sampled_from(Right),
    prefill=st.none() | WORKERS,
    decode=WORKERS,
    transfer=st.none() | TRANSFERS,
)


@given(CLAIMS, CLAIMS)
def test_no_two_claims_have_equal_bytes(one, two):
    assert (one.encoded(1.0) == two.encoded(1.0)) == (one == two)


@given(*[st.text(max_size=3)] * 4)
def test_fields_cannot_flow_into_each_other(a, b, c, d):
    one = Claim(
        right=Right.WRITE,
        prefill=WorkerRef(name=a, incarnation=b),
        decode=WorkerRef(name=c, incarnation=d),
    )
    two = replace(one, prefill=WorkerRef(name=a + b, incarnation=""))
    assert (one.encoded(1.0) == two.encoded(1.0)) == (one == two)


def test_a_secret_comes_from_its_file_or_the_environment(tmp_path, monkeypatch):
    file = tmp_path / "secret"
    file.write_bytes(SECRET + b"\n")
    assert secret_for_cluster(str(file)) == SECRET
    monkeypatch.setenv("TANDEM_SECRET", "from the environment, long enough")
    assert secret_for_cluster(None) == b"from the environment, long enough"
    monkeypatch.delenv("TANDEM_SECRET")
    assert secret_for_cluster(None) != secret_for_cluster(None)


def test_a_short_or_missing_secret_is_a_clear_refusal(tmp_path):
    file = tmp_path / "secret"
    file.write_bytes(b"short")
    with pytest.raises(ConfigError, match="at least 16 bytes"):
        secret_for_cluster(str(file))
    with pytest.raises(ConfigError, match="cannot read"):
        secret_for_cluster(str(tmp_path / "none"))


def test_the_stored_secret_is_its_users_alone(tmp_path):
    store_secret(tmp_path, SECRET)
    assert load_secret(tmp_path) == SECRET
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
