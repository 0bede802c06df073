"""How much trying again the gateway allows itself, and what it will not try again."""

import time
from collections import deque
from collections.abc import Callable

_WINDOW_S = 60.0


class RetryBudget:
    """Retries of the last minute stay below `floor` plus `ratio` of its requests.

    Where a whole pool fails, every request would be tried again and again, and the rest of the
    cluster with it; past the budget requests fail instead. The floor lets a quiet gateway move the
    streams of one lost worker.
    """

    def __init__(
        self, ratio: float, floor: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ratio = ratio
        self._floor = floor
        self._clock = clock
        self._requests: deque[float] = deque()
        self._retries: deque[float] = deque()

    def request(self) -> None:
        """A request came."""
        self._requests.append(self._clock())

    def take(self) -> bool:
        """Whether one more retry is within the budget; if so it is counted."""
        now_s = self._clock()
        for times in (self._requests, self._retries):
            while times and times[0] < now_s - _WINDOW_S:
                times.popleft()
        if len(self._retries) >= self._floor + self._ratio * len(self._requests):
            return False
        self._retries.append(now_s)
        return True


class Poison:
    """Prompts that cost two workers: refused for a while, lest they cost the others too.

    To their tenant and by their model alone: nobody learns of another's prompts, or keeps others
    from theirs, and to another model the same token ids are another prompt.
    """

    def __init__(self, quarantine_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._quarantine_s = quarantine_s
        self._clock = clock
        self._until_s: dict[int, float] = {}

    def add(self, model: str, tenant: str, prompt_token_ids: tuple[int, ...]) -> None:
        """This prompt cost two of the model's workers."""
        now_s = self._clock()
        self._until_s = {key: end_s for key, end_s in self._until_s.items() if end_s > now_s}
        self._until_s[hash((model, tenant, prompt_token_ids))] = now_s + self._quarantine_s

    def remaining_s(self, model: str, tenant: str, prompt_token_ids: tuple[int, ...]) -> float:
        """How long the prompt is still refused; 0 where it is not."""
        if not self._until_s:
            return 0.0
        until_s = self._until_s.get(hash((model, tenant, prompt_token_ids)), 0.0)
        return max(0.0, until_s - self._clock())
