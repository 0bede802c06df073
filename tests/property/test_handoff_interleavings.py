"""Both hand-off tables, driven through random interleavings of everything that can happen.

The model in `handoff_model` carries the tables' actions out as the two desks do; its worlds check
every promise of `docs/handoff.md` after each move, and that all blocks are back at the end.

The short run takes the same examples each time, so that it fails only where something has changed;
`make test-long` takes new ones.
"""

import secrets
from collections import Counter

import pytest
from handoff_model.faults import DeskFault
from handoff_model.machine import examples, machine_of, run, search_only
from handoff_model.mutations import MUTATIONS
from handoff_model.network import Violation
from handoff_model.walks import walk
from hypothesis import settings

from engine import block_manager
from kv_transfer import states
from kv_transfer.states import (
    RECEIVER,
    SENDER,
    ReceiverEvent,
    ReceiverState,
    SenderEvent,
    SenderState,
)

LONG = settings.get_current_profile_name() == "long"
# How a wrong table shows: a broken promise, a lease moved out of turn, a request taken out twice.
FOUND = (Violation, states.IllegalMove, block_manager.IllegalMove, KeyError)
# Edges that keep a peer's or a timer's word legal, though no desk of ours brings it about.
NEVER_TAKEN = {
    # A refusal is said before anything else.
    (ReceiverState.RECEIVING, ReceiverEvent.REFUSED),
    # The last chunk is a chunk, and its write failed or did not, but not both.
    (SenderState.ACCEPTED, SenderEvent.WRITTEN),
    (SenderState.COMMIT_SENT, SenderEvent.GIVE_UP),
    # The desk forgets what it released, and answers by itself for what it does not know.
    (SenderState.RELEASED, SenderEvent.CANCEL),
}


def _tell(capsys, line):
    """Says what a long run did."""
    if LONG:
        with capsys.disabled():
            print(f"\n{line}", end=" ")


@pytest.mark.timeout(3600 if LONG else 180)
def test_no_interleaving_breaks_a_promise(capsys):
    machine = machine_of()
    run(machine, examples(3000 if LONG else 120, derandomize=not LONG))
    _tell(capsys, f"{machine.steps} steps of the state machine")
    assert machine.steps >= (100_000 if LONG else 3_000)


@pytest.mark.timeout(3600 if LONG else 180)
def test_random_walks_take_every_edge_and_break_no_promise(capsys):
    edges = Counter()
    first = secrets.randbits(32) if LONG else 0
    for seed in range(first, first + (20_000 if LONG else 500)):
        edges += walk(seed).edges
    _tell(capsys, f"{edges.total()} edges taken in walks from seed {first}")
    # None of the edges that do something is right by never being tried.
    wanted = {edge for table in (RECEIVER, SENDER) for edge, (_, acts) in table.items() if acts}
    assert wanted - edges.keys() == NEVER_TAKEN


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_edge_is_found(name):
    with pytest.raises(FOUND):
        for seed in range(3000):
            walk(seed, **MUTATIONS[name])


@pytest.mark.parametrize("fault", DeskFault)
def test_a_mistake_around_right_tables_is_found(fault):
    with pytest.raises(FOUND):
        for seed in range(3000):
            walk(seed, faults={fault})


@pytest.mark.parametrize(
    "name",
    [
        "a lost stream frees what was asked for",
        "a stop skips the quarantine",
        "blocks are freed twice",
        "a refusal is told to nobody",
        "blocks are adopted unverified",
        "a cancel frees what is being written",
        "a failure is told twice",
    ],
)
def test_the_state_machine_finds_a_wrong_edge_too(name):
    with pytest.raises(FOUND):
        run(machine_of(**MUTATIONS[name]), search_only(400))
