"""Whose prompts are read first where several tenants have some: those of who had less lately.

Who asks for little is not to wait behind the many prompts of one who asks for much. Owned by the
one that plans steps; time is an argument. Bounded: who steps back has every step in which nobody
else's prompts wait, and its turn again as what it had fades: after 10 s times ln(tenants) or so.
"""

import math
from collections.abc import Iterable

# What was read fades by e in so long.
_MEMORY_S = 10.0
# It is counted anew so often: a step's own cost does not grow with tenants that were here before.
_REFRESH_S = 0.1
# A tenant that had more than so many equal shares steps back; those that are about even do not.
_MUCH = 1.25
# Less than so many tokens that are left of what a tenant had are nothing.
_FORGOTTEN = 1.0


class ReadingTurns:
    """Prompt tokens that were read lately, by tenant (`Sequence.cache_salt`)."""

    def __init__(self) -> None:
        self._read: dict[str, float] = {}
        self._total = 0.0
        self._fresh_s = -math.inf

    def observe(self, tokens_of: Iterable[tuple[str, int]], *, now_s: float) -> None:
        """A step has read so many tokens, tenant by tenant."""
        self._fade(now_s)
        for tenant, num_tokens in tokens_of:
            self._read[tenant] = self._read.get(tenant, 0.0) + num_tokens
            self._total += num_tokens

    def behind(self, tenants: Iterable[str], *, now_s: float) -> frozenset[str]:
        """Those of `tenants`, who have prompts to be read, that step back.

        Shares are counted among them and all that had something lately.
        """
        present = set(tenants)
        self._fade(now_s)
        count = len(self._read) + sum(tenant not in self._read for tenant in present)
        if count < 2:
            return frozenset()
        most = _MUCH * self._total / count
        return frozenset(tenant for tenant in present if self._read.get(tenant, 0.0) > most)

    def _fade(self, now_s: float) -> None:
        passed_s = now_s - self._fresh_s
        if passed_s < _REFRESH_S:
            return
        self._fresh_s = now_s
        kept = math.exp(-passed_s / _MEMORY_S)
        faded = {tenant: num * kept for tenant, num in self._read.items()}
        self._read = {tenant: num for tenant, num in faded.items() if num >= _FORGOTTEN}
        self._total = sum(self._read.values())
