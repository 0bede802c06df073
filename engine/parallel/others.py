"""The ranks beside this one, as a runner sees them."""

import contextlib
from contextlib import AbstractContextManager
from typing import Protocol

from engine.step_batch import StepBatch


class OtherRanks(Protocol):
    """Whoever computes a model together with this process."""

    def step(self, batch: StepBatch) -> AbstractContextManager[object]:
        """Has them compute this batch. Within the context this rank does so too.

        Where it raises there, the ranks no longer stand at the same point: the model is lost.
        """
        ...


class _Alone:
    """There are none."""

    def step(self, batch: StepBatch) -> AbstractContextManager[object]:
        return contextlib.nullcontext()


ALONE: OtherRanks = _Alone()
