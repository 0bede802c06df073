"""The hand-off's tables keep their promises on every path, and docs/handoff.md shows them."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer import describe, states
from kv_transfer.states import (
    RECEIVER,
    SENDER,
    IllegalMove,
    ReceiverAction,
    ReceiverEvent,
    ReceiverState,
    SenderAction,
    SenderEvent,
    SenderState,
)

PAGE = Path(__file__).resolve().parents[3] / "docs" / "handoff.md"
# What a peer, a timer or a client can cause at any time once the prefill worker was asked.
FROM_OUTSIDE = (
    ReceiverEvent.CHUNK,
    ReceiverEvent.COMMIT,
    ReceiverEvent.COMMIT_ENDED,
    ReceiverEvent.REFUSED,
    ReceiverEvent.QUIESCED,
    ReceiverEvent.PEER_LOST,
)
# Events that prove that no write can land any more.
PROOFS = {
    ReceiverEvent.COMMIT,
    ReceiverEvent.COMMIT_ENDED,
    ReceiverEvent.REFUSED,
    ReceiverEvent.QUIESCED,
    ReceiverEvent.PROVEN,
}


def walk(table, machine, choices):
    """Takes a random legal path; yields (event, actions)."""
    for choice in choices:
        legal = [event for state, event in table if state is machine.state]
        event = legal[choice % len(legal)]
        yield event, machine.move(event)


PATHS = st.lists(st.integers(0, 1000), max_size=30)


@given(PATHS)
def test_a_received_transfer_has_one_outcome_and_frees_once(path):
    machine = states.receiver()
    actions = [action for _, taken in walk(RECEIVER, machine, path) for action in taken]
    outcomes = [a for a in actions if a in (ReceiverAction.FAIL, ReceiverAction.END)]
    assert len(outcomes) <= 1
    freed = actions.count(ReceiverAction.FREE)
    assert freed == (1 if machine.state is ReceiverState.FREED else 0)
    if machine.state in (ReceiverState.FREED, ReceiverState.QUARANTINED):
        assert len(outcomes) == 1


@given(PATHS)
def test_blocks_that_a_peer_was_told_of_are_freed_only_after_proof(path):
    machine = states.receiver()
    asked = proven = False
    for event, actions in walk(RECEIVER, machine, path):
        asked = asked or event is ReceiverEvent.ASKED
        proven = proven or event in PROOFS
        if ReceiverAction.FREE in actions and asked:
            assert proven


@given(PATHS)
def test_a_sent_transfer_releases_once_and_never_while_it_writes(path):
    machine = states.sender()
    released = 0
    for event, actions in walk(SENDER, machine, path):
        released += actions.count(SenderAction.RELEASE)
        if SenderAction.RELEASE in actions:
            assert event is SenderEvent.DRAINED or SenderAction.WRITE not in actions
            assert machine.state is SenderState.RELEASED
    assert released == (1 if machine.state is SenderState.RELEASED else 0)


@pytest.mark.parametrize("event", FROM_OUTSIDE)
@pytest.mark.parametrize("state", [s for s in ReceiverState if s is not ReceiverState.RESERVED])
def test_nothing_that_a_peer_says_is_illegal_once_it_was_asked(state, event):
    assert (state, event) in RECEIVER


@pytest.mark.parametrize(
    "event",
    [SenderEvent.CANCEL, SenderEvent.ADOPTED, SenderEvent.PEER_LOST, SenderEvent.GIVE_UP],
)
@pytest.mark.parametrize("state", [SenderState.DRAINING, SenderState.RELEASED])
def test_nothing_that_comes_late_is_illegal_to_a_sender(state, event):
    assert (state, event) in SENDER


def test_a_cancel_is_answered_however_late():
    for state in SenderState:
        machine = states.Machine(SENDER, state)
        actions = list(machine.move(SenderEvent.CANCEL))
        if machine.state is SenderState.DRAINING:
            actions += machine.move(SenderEvent.DRAINED)
        assert SenderAction.SEND_QUIESCED in actions


def test_a_lost_peer_is_no_proof():
    machine = states.receiver()
    machine.move(ReceiverEvent.ASKED)
    actions = machine.move(ReceiverEvent.PEER_LOST)
    assert machine.state is ReceiverState.QUARANTINED
    assert ReceiverAction.FREE not in actions


def test_an_event_out_of_turn_is_a_fault():
    with pytest.raises(IllegalMove, match="VERIFIED"):
        states.receiver().move(ReceiverEvent.VERIFIED)


@given(PATHS)
def test_what_was_quarantined_is_not_used_again_before_it_is_freed(path):
    machine = states.receiver()
    quarantined = False
    for _, actions in walk(RECEIVER, machine, path):
        quarantined = quarantined or ReceiverAction.QUARANTINE in actions
        assert not (quarantined and ReceiverAction.ADOPT in actions)


def test_a_receiver_that_gives_up_tells_a_sender_that_can_hear():
    """A stop or a wrong digest comes while the stream is up; only a lost stream is not told."""
    for (state, event), (after, actions) in RECEIVER.items():
        if after is ReceiverState.QUARANTINED and state is not after:
            assert (ReceiverAction.SEND_CANCEL in actions) == (event is not ReceiverEvent.PEER_LOST)
            assert actions[-1] is ReceiverAction.SEEK_PROOF  # it may free them at once


def test_no_state_is_a_trap():
    for table, last in ((RECEIVER, ReceiverState.FREED), (SENDER, SenderState.RELEASED)):
        left = {last}
        for _ in type(last):
            left |= {state for (state, _), (after, _) in table.items() if after in left}
        assert left == set(type(last))


def test_the_pages_tables_are_the_codes():
    text = PAGE.read_text()
    assert describe.page(text) == text, "run: python -m kv_transfer.describe docs/handoff.md"


@pytest.mark.parametrize("table", [RECEIVER, SENDER], ids=["receiver", "sender"])
def test_a_rendered_table_has_every_edge_once(table):
    rows = [line.strip("|").split("|") for line in describe.markdown(table).splitlines()[2:]]
    shown = [(row[0].strip(), event.strip()) for row in rows for event in row[1].split(",")]
    edges = [(state.name, event.value.replace("_", " ")) for state, event in table]
    assert sorted(shown) == sorted(edges)


def test_a_page_without_tables_stays_as_it_is():
    assert describe.page("nothing to see") == "nothing to see"


def test_both_tables_are_on_the_page():
    text = PAGE.read_text()
    assert describe.markdown(RECEIVER) in text
    assert describe.markdown(SENDER) in text
