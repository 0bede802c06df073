"""Who sent a request, and what they may do."""

from dataclasses import dataclass

from core.errors import InvalidRequest
from gateway.limits import Quota, Resource


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """One API key's owner. Requests of one tenant share prefix-cache entries, those of two never.

    `models` None is every model. `max_priority` is how far ahead of others a request may go: a
    request's `priority`, of which the lower goes first, is at least its negative.
    """

    key_id: str | None = None
    tenant: str = ""
    max_priority: int = 0
    models: frozenset[str] | None = None
    quotas: tuple[Quota, ...] = ()

    def may_use(self, *names: str) -> bool:
        """Whether it may use the model that has these names: one of them in the list will do."""
        return self.models is None or not self.models.isdisjoint(names)

    def priority(self, asked: int | None) -> int:
        """The priority of a request that asks for this one, or for none.

        Raises InvalidRequest where others would have to stand back further than the key allows.
        """
        lowest = -self.max_priority
        if asked is not None and asked < lowest:
            raise InvalidRequest(f"must be at least {lowest} with this API key", field="priority")
        return max(0, lowest) if asked is None else asked

    def quotas_of(self, resource: Resource) -> tuple[Quota, ...]:
        return tuple(quota for quota in self.quotas if quota.resource is resource)


# Everybody, where nobody is asked for a key: then no key bounds what they ask for.
ANONYMOUS = Caller(max_priority=1000)
