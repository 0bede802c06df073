"""When a child that ended may start again."""

from collections import deque

_FIRST_DELAY_S = 0.1
_LAST_DELAY_S = 5.0
# A life this long wipes out the memory of the crashes before it.
_SETTLED_S = 30.0
_MAX_CRASHES = 10
_CRASH_WINDOW_S = 60.0
# Something that has never worked is not tried as often as something that has.
_MAX_FALSE_STARTS = 3


class Restarts:
    """Exponential backoff with an end. Time is an argument."""

    def __init__(self) -> None:
        self._crashes: deque[float] = deque(maxlen=_MAX_CRASHES)
        self._delay_s = _FIRST_DELAY_S
        self._has_worked = False

    def next_delay_s(self, *, lived_s: float, was_ready: bool, now_s: float) -> float | None:
        """How long to wait after a crash before the next start; None: give up."""
        self._has_worked |= was_ready
        if lived_s >= _SETTLED_S and was_ready:
            self._delay_s = _FIRST_DELAY_S
        self._crashes.append(now_s)
        if not self._has_worked and len(self._crashes) >= _MAX_FALSE_STARTS:
            return None
        if len(self._crashes) == _MAX_CRASHES and now_s - self._crashes[0] < _CRASH_WINDOW_S:
            return None
        delay_s = self._delay_s
        self._delay_s = min(2 * delay_s, _LAST_DELAY_S)
        return delay_s
