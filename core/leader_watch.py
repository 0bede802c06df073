"""Asks the lease again and again who leads, for processes that serve that leader."""

import asyncio
import contextlib
from collections.abc import Callable

from core.errors import StoreAway
from core.store.lease import Lease, LeaseStore

_LOOK_EVERY_S = 0.5


async def watch_leader(store: LeaseStore, on_lease: Callable[[Lease], None]) -> None:
    """Tells of the lease as it stands, until cancelled. A store that is away tells nothing.

    A leader that is dead shows by its connection; one that is frozen or cut off shows here first.
    """
    while True:
        with contextlib.suppress(StoreAway):
            if (lease := await store.read()) is not None:
                on_lease(lease)
        await asyncio.sleep(_LOOK_EVERY_S)
