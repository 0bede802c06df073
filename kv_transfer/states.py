"""The hand-off's two state machines, as tables.

Pure: `(state, event) -> (next state, actions)`. The workers' desks turn messages, timers and lost
streams into events and carry the actions out in order. A pair that is not in a table is a fault of
the driver and raises; what may arrive late or twice is in the table with no action.

Two rules shape them. Every transfer ends exactly once: END and FAIL, the actions that tell the
outcome, stand only on edges into states that have none. And the receiver's blocks are freed only
when no write can land any more: the sender said so (COMMITTED, REFUSED, QUIESCED), it is dead, or
its access was revoked (PROVEN).
"""

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar


class ReceiverState(enum.Enum):
    """Where a decode worker's side stands."""

    RESERVED = "reserved"  # blocks leased, nobody asked yet
    OFFERED = "offered"  # the prefill worker was asked
    RECEIVING = "receiving"  # blocks are being written
    COMMITTED = "committed"  # all written, the sender says; digests are being compared
    ADOPTED = "adopted"  # the sequence decodes
    QUARANTINED = "quarantined"  # failed; a write could still land
    FREED = "freed"


class ReceiverEvent(enum.Enum):
    """What can happen to it."""

    ASKED = "asked"
    LOCAL = "local"  # nobody is asked: this worker reads the prompt itself
    CHUNK = "chunk"
    COMMIT = "commit"
    COMMIT_ENDED = "commit_ended"  # the first token ended the request: no KV is needed
    VERIFIED = "verified"
    CORRUPT = "corrupt"
    REFUSED = "refused"  # nothing was or will be written
    QUIESCED = "quiesced"  # the sender gave up, and no write is under way
    PEER_LOST = "peer_lost"
    STOPPED = "stopped"  # cancel or deadline
    PROVEN = "proven"  # the sender is dead, or its access was revoked
    DONE = "done"  # decoding ended


class ReceiverAction(enum.Enum):
    """What the desk does then."""

    SEND_PREFILL = "send_prefill"
    SEND_ADOPTED = "send_adopted"
    SEND_CANCEL = "send_cancel"
    VERIFY = "verify"
    ADOPT = "adopt"
    QUARANTINE = "quarantine"
    SEEK_PROOF = "seek_proof"  # revoke what can be revoked; watch for the sender's death
    FREE = "free"
    FAIL = "fail"  # tell the gateway that it failed, and why
    END = "end"  # tell the gateway that it ended


class SenderState(enum.Enum):
    """Where a prefill worker's side stands."""

    ACCEPTED = "accepted"
    SENDING = "sending"
    COMMIT_SENT = "commit_sent"
    DRAINING = "draining"  # given up; writes in flight finish
    RELEASED = "released"


class SenderEvent(enum.Enum):
    """What can happen to it."""

    CHUNK = "chunk"
    WRITTEN = "written"  # the last chunk is in the receiver's memory
    ADOPTED = "adopted"
    CANCEL = "cancel"  # the receiver gave up
    GIVE_UP = "give_up"  # deadline, or a failed computation or write
    PEER_LOST = "peer_lost"
    LEASE_OVER = "lease_over"  # the receiver never answered the commit
    DRAINED = "drained"  # neither computation nor write is under way


class SenderAction(enum.Enum):
    """What the desk does then."""

    WRITE = "write"
    SEND_COMMIT = "send_commit"
    DRAIN = "drain"  # leave the batch, skip queued writes, then report DRAINED
    RELEASE = "release"
    SEND_QUIESCED = "send_quiesced"


S = TypeVar("S", bound=enum.Enum)
E = TypeVar("E", bound=enum.Enum)
A = TypeVar("A", bound=enum.Enum)
Table = Mapping[tuple[S, E], tuple[S, tuple[A, ...]]]


def _late(state: S, events: Iterable[E]) -> dict[tuple[S, E], tuple[S, tuple[A, ...]]]:
    """Events that may still arrive in a state and change nothing."""
    return {(state, event): (state, ()) for event in events}


def _receiver() -> Table[ReceiverState, ReceiverEvent, ReceiverAction]:
    s, e, a = ReceiverState, ReceiverEvent, ReceiverAction
    table: dict[
        tuple[ReceiverState, ReceiverEvent], tuple[ReceiverState, tuple[ReceiverAction, ...]]
    ] = {
        (s.RESERVED, e.ASKED): (s.OFFERED, (a.SEND_PREFILL,)),
        (s.RESERVED, e.LOCAL): (s.ADOPTED, (a.ADOPT,)),
        # Nobody was asked: nothing can land.
        (s.RESERVED, e.STOPPED): (s.FREED, (a.FREE, a.FAIL)),
        (s.RESERVED, e.PEER_LOST): (s.FREED, (a.FREE, a.FAIL)),
        (s.OFFERED, e.CHUNK): (s.RECEIVING, ()),
        (s.RECEIVING, e.CHUNK): (s.RECEIVING, ()),
        (s.COMMITTED, e.VERIFIED): (s.ADOPTED, (a.ADOPT, a.SEND_ADOPTED)),
        # After the commit nothing more is written; losing the sender costs nothing.
        (s.COMMITTED, e.PEER_LOST): (s.COMMITTED, ()),
        (s.ADOPTED, e.DONE): (s.FREED, (a.FREE, a.END)),
    }
    for state in (s.OFFERED, s.RECEIVING):
        table |= {
            (state, e.COMMIT): (s.COMMITTED, (a.VERIFY,)),
            (state, e.COMMIT_ENDED): (s.FREED, (a.SEND_ADOPTED, a.FREE, a.END)),
            (state, e.REFUSED): (s.FREED, (a.FREE, a.FAIL)),
            (state, e.QUIESCED): (s.FREED, (a.FREE, a.FAIL)),
            (state, e.PEER_LOST): (s.QUARANTINED, (a.QUARANTINE, a.FAIL, a.SEEK_PROOF)),
        }
    for state, event in (
        (s.OFFERED, e.STOPPED),
        (s.RECEIVING, e.STOPPED),
        (s.COMMITTED, e.STOPPED),
        (s.COMMITTED, e.CORRUPT),
    ):
        actions = (a.QUARANTINE, a.SEND_CANCEL, a.FAIL, a.SEEK_PROOF)
        table[state, event] = (s.QUARANTINED, actions)
    for event in (e.QUIESCED, e.REFUSED, e.PROVEN):
        table[s.QUARANTINED, event] = (s.FREED, (a.FREE,))
    # A lost stream is no proof: the sender may write on. Watch for its death instead.
    table[s.QUARANTINED, e.PEER_LOST] = (s.QUARANTINED, (a.SEEK_PROOF,))
    late = (e.CHUNK, e.COMMIT, e.COMMIT_ENDED, e.VERIFIED, e.CORRUPT, e.STOPPED)
    table |= _late(s.QUARANTINED, late)
    # The sender let go after its commit (its lease ran out): all it had to write is written.
    table |= _late(s.COMMITTED, (e.CHUNK, e.COMMIT, e.COMMIT_ENDED, e.QUIESCED, e.REFUSED))
    table |= _late(s.ADOPTED, (*late, e.PEER_LOST, e.QUIESCED, e.REFUSED))
    table |= _late(s.FREED, set(e) - {e.ASKED, e.LOCAL})
    return table


def _sender() -> Table[SenderState, SenderEvent, SenderAction]:
    s, e, a = SenderState, SenderEvent, SenderAction
    table: dict[tuple[SenderState, SenderEvent], tuple[SenderState, tuple[SenderAction, ...]]] = {
        (s.DRAINING, e.DRAINED): (s.RELEASED, (a.RELEASE, a.SEND_QUIESCED)),
        (s.COMMIT_SENT, e.ADOPTED): (s.RELEASED, (a.RELEASE,)),
        # Whoever cancels waits for the word that nothing more is written, however late it asks.
        (s.RELEASED, e.CANCEL): (s.RELEASED, (a.SEND_QUIESCED,)),
    }
    for state in (s.ACCEPTED, s.SENDING):
        table[state, e.CHUNK] = (s.SENDING, (a.WRITE,))
        table[state, e.WRITTEN] = (s.COMMIT_SENT, (a.SEND_COMMIT,))
        for event in (e.CANCEL, e.GIVE_UP, e.PEER_LOST):
            table[state, event] = (s.DRAINING, (a.DRAIN,))
    for event in (e.CANCEL, e.LEASE_OVER, e.PEER_LOST, e.GIVE_UP):
        table[s.COMMIT_SENT, event] = (s.RELEASED, (a.RELEASE, a.SEND_QUIESCED))
    table |= _late(s.DRAINING, set(e) - {e.DRAINED})
    table |= _late(s.RELEASED, set(e) - {e.CANCEL})
    return table


RECEIVER = _receiver()
SENDER = _sender()


class IllegalMove(Exception):
    """An event that its state does not know: a fault of the driver."""


@dataclass(slots=True)
class Machine(Generic[S, E, A]):
    """One transfer's state, moved through a table."""

    table: Table[S, E, A]
    state: S

    def move(self, event: E) -> tuple[A, ...]:
        """Takes the event; gives the actions to carry out, in order. Raises IllegalMove."""
        try:
            self.state, actions = self.table[self.state, event]
        except KeyError:
            raise IllegalMove(f"{event} in {self.state}") from None
        return actions


def receiver() -> Machine[ReceiverState, ReceiverEvent, ReceiverAction]:
    """A receiver's machine, its blocks just leased."""
    return Machine(RECEIVER, ReceiverState.RESERVED)


def sender() -> Machine[SenderState, SenderEvent, SenderAction]:
    """A sender's machine, its request just accepted."""
    return Machine(SENDER, SenderState.ACCEPTED)


def tally(kind: type[ReceiverState] | type[SenderState], found: Iterable[S]) -> dict[str, int]:
    """How many are in each state, by its name, zeros too; an end is no state to be in."""
    counts = {
        state.value: 0 for state in kind if state not in (ReceiverState.FREED, SenderState.RELEASED)
    }
    for state in found:
        counts[state.value] = counts.get(state.value, 0) + 1
    return counts
