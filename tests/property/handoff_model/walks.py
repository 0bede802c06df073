"""Random walks through the model world: many moves for little time, and the same for one seed.

Hypothesis finds the short way to a failure; these go further in the same time, and so find what
needs many moves in the right order.
"""

import random

from handoff_model.disturbances import DISTURBANCES
from handoff_model.world import World

_STEPS = 150
# How often each kind of disturbance comes, beside the others.
_NAMES = [
    name
    for name, weight in {
        "timers": 4,
        "cancels": 6,
        "breaks": 4,
        "hang_ups": 5,
        "stalls": 5,
        "replays": 6,
        "damages": 2,
        "freezes": 2,
        "deaths": 1,
        "gateway_losses": 1,
    }.items()
    for _ in range(weight)
]


def walk(seed, **world_settings):
    """One world, `_STEPS` moves and its rest. Raises what broke, with the seed in a note."""
    chance = random.Random(seed)
    one_sided_share = chance.choice((0.3, 0.6, 1.0, 1.0))
    one_sided = {(p, d): chance.random() < one_sided_share for p in "01" for d in "01"}
    world = World(
        one_sided=lambda prefill, decode: one_sided[prefill[-1], decode[-1]], **world_settings
    )
    starting = chance.choice((0.02, 0.05, 0.1))
    disturbing = starting + chance.choice((0.02, 0.06, 0.15))
    try:
        for _ in range(_STEPS):
            _move(world, chance, chance.random(), starting, disturbing)
            world.check()
        world.settle()
    except Exception as error:
        error.add_note(f"walk({seed})")
        raise
    return world


def _move(world, chance, dice, starting, disturbing):
    if dice < starting or not world.busy:
        world.start(
            chance.randrange(2),
            chance.randrange(2),
            chance.randint(1, 3),
            retry=chance.random() < 0.5,
            stale=chance.random() < 0.2,
        )
        return
    kind = DISTURBANCES[chance.choice(_NAMES)] if dice < disturbing else World.progress
    if moves := kind(world):
        chance.choice(moves)()
