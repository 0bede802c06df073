"""Which tenants hold more than their share of what runs."""

from collections.abc import Mapping

_SEEN_S = 60.0  # a tenant that asked for nothing in so long is not expected back soon
_REFRESH_S = 0.05


class Shares:
    """Remembers who asked lately. Alone, a tenant may have everything."""

    def __init__(self) -> None:
        self._seen_s: dict[str, float] = {}
        self._greedy: frozenset[str] = frozenset()
        self._fresh_until_s = 0.0

    def seen(self, tenant: str, *, now_s: float) -> None:
        """The tenant asks for something."""
        if tenant not in self._seen_s:
            self._fresh_until_s = now_s
        self._seen_s[tenant] = now_s

    def greedy(self, num_running: Mapping[str, int], *, now_s: float) -> frozenset[str]:
        """Tenants with more than an equal part of the running answers, where there are several."""
        if now_s < self._fresh_until_s or (len(self._seen_s) < 2 and not self._greedy):
            return self._greedy
        self._fresh_until_s = now_s + _REFRESH_S
        since_s = now_s - _SEEN_S
        self._seen_s = {
            tenant: seen_s
            for tenant, seen_s in self._seen_s.items()
            if seen_s >= since_s or tenant in num_running
        }
        total, count = sum(num_running.values()), len(self._seen_s)
        self._greedy = (
            frozenset(tenant for tenant, num in num_running.items() if num * count > total)
            if count > 1
            else frozenset()
        )
        return self._greedy
