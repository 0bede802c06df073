"""The model world as a hypothesis state machine."""

from collections import Counter
from functools import partial
from typing import ClassVar

from handoff_model.disturbances import DISTURBANCES
from handoff_model.world import World
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

PICK = st.integers(0, 255)


class HandoffMachine(RuleBasedStateMachine):
    """Draws moves of a World and checks every promise after each of them."""

    # Of one kind of machine, for all its worlds: see `machine_of`.
    world_settings: ClassVar[dict[str, object]]
    steps: ClassVar[int]
    edges: ClassVar[Counter]

    def __init__(self):
        super().__init__()
        self.world = None
        self.failed = False

    @initialize(one_sided=st.lists(st.booleans(), min_size=4, max_size=4))
    def begin(self, one_sided):
        """Each pair of workers has its own transport."""
        pairs = {(p, d): one_sided[2 * p + d] for p in (0, 1) for d in (0, 1)}
        self.world = World(
            one_sided=lambda prefill, decode: pairs[int(prefill[-1]), int(decode[-1])],
            **self.world_settings,
        )

    @rule(
        starts=st.lists(st.tuples(PICK, PICK, st.integers(1, 3)), min_size=1, max_size=4),
        retry=st.booleans(),
        stale=st.booleans(),
    )
    def requests_come(self, starts, retry, stale):
        """Several at once, so that they wait for each other's blocks."""
        for prefill, decode, blocks in starts:
            self._guarded(
                partial(self.world.start, prefill, decode, blocks, retry=retry, stale=stale)
            )

    @precondition(lambda self: self.world.busy)
    @rule(picks=st.lists(PICK, min_size=1, max_size=6))
    def little_time_passes(self, picks):
        self._progress(picks)

    @precondition(lambda self: self.world.busy)
    @rule(picks=st.lists(PICK, min_size=8, max_size=40))
    def much_time_passes(self, picks):
        self._progress(picks)

    @precondition(lambda self: self.world.busy)
    @rule(pick=PICK, what=st.sampled_from(("cancels", "timers")))
    def somebody_gives_up(self, pick, what):
        self._move(DISTURBANCES[what](self.world), pick)

    @precondition(lambda self: self.world.busy)
    @rule(pick=PICK, what=st.sampled_from(("breaks", "hang_ups", "stalls", "damages", "replays")))
    def something_is_lost_or_comes_again(self, pick, what):
        self._move(DISTURBANCES[what](self.world), pick)

    @rule(pick=PICK, what=st.sampled_from(("freezes", "deaths", "gateway_losses")))
    def a_process_fails_or_returns(self, pick, what):
        self._move(DISTURBANCES[what](self.world), pick)

    def teardown(self):
        if self.world is not None and not self.failed:
            type(self).edges.update(self.world.edges)
            self.world.settle()

    def _progress(self, picks):
        for pick in picks:
            if not (moves := self.world.progress()):
                break
            self._move(moves, pick)

    def _move(self, moves, pick):
        if moves:
            self._guarded(moves[pick % len(moves)])

    def _guarded(self, move):
        type(self).steps += 1
        try:
            move()
            self.world.check()
        except BaseException:
            self.failed = True
            raise


def machine_of(**world_settings):
    """A machine over worlds of these settings, with counters of its own."""
    name = HandoffMachine.__name__
    members = {"world_settings": world_settings, "steps": 0, "edges": Counter()}
    return type(name, (HandoffMachine,), members)


def examples(count, *, derandomize):
    """Settings for so many worlds."""
    return settings(
        max_examples=count,
        stateful_step_count=50,
        derandomize=derandomize,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )


def search_only(count):
    """Settings to see whether a mistake is found among so many worlds: the first one ends it."""
    return settings(examples(count, derandomize=True), phases=[Phase.generate])


def run(machine, given):
    """Raises what broke, with the shortest way there that was found."""
    run_state_machine_as_test(machine, settings=given)
