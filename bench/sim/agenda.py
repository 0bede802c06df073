"""Virtual time, and what happens in it."""

import heapq
import itertools
from collections.abc import Callable

from core.errors import InvalidRequest

Call = Callable[..., None]


class Agenda:
    """Calls in the order of their times; those of one time in the order in which they were made."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._calls: list[tuple[float, int, Call, tuple[object, ...]]] = []
        self._count = itertools.count()

    def at(self, time_s: float, call: Call, *args: object) -> None:
        """Calls then; at once, but after what stands for now already, where that is past."""
        entry = (max(time_s, self.now_s), next(self._count), call, args)
        heapq.heappush(self._calls, entry)

    def after(self, delay_s: float, call: Call, *args: object) -> None:
        """Calls that much later."""
        self.at(self.now_s + delay_s, call, *args)

    def run(self, *, until: Callable[[], bool], horizon_s: float) -> None:
        """Until `until` says so or nothing is left to happen.

        Raises InvalidRequest past the horizon: the load is one that the cluster never works off.
        """
        calls = self._calls
        while calls and not until():
            time_s, _, call, args = heapq.heappop(calls)
            if time_s > horizon_s:
                raise InvalidRequest(
                    f"after {horizon_s:g} s of simulated time requests are still unanswered",
                    field="rate",
                )
            self.now_s = time_s
            call(*args)
