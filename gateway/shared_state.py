"""What gateways share where there is a Redis, and what each has by itself where there is none."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry

from core.leader_watch import watch_leader
from core.metrics.shared import RedisCollector
from core.process import ProcessContext
from core.store.connect import connect, leases_in
from core.store.lease import Lease
from core.tickets import load_secret
from gateway.journal import Journal
from gateway.journal_store import JournalStore, MemoryJournals
from gateway.limits import MemoryQuotas, QuotaStore


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedState:
    """Where this gateway keeps what others may keep as well."""

    quotas: QuotaStore
    # None: streams cannot be taken up again.
    journal: Journal | None


@asynccontextmanager
async def shared_state(
    context: ProcessContext,
    registry: CollectorRegistry,
    *,
    on_lease: Callable[[Lease], None],
) -> AsyncIterator[SharedState]:
    """In Redis inside the block where there is one, else in memory.

    `on_lease` hears from Redis who leads. Raises ConfigError where Redis is not to be had so.
    """
    config, secret = context.config, load_secret(context.run_dir)
    link = connect(config)
    quotas: QuotaStore = MemoryQuotas()
    kept = config.gateway
    streams: JournalStore = MemoryJournals(ttl_s=kept.resume_ttl_s, max_bytes=kept.resume_max_bytes)
    tasks: list[Coroutine[Any, Any, None]] = []
    if link is not None:
        from gateway.redis_journal import RedisJournals
        from gateway.redis_quotas import RedisQuotas

        registry.register(RedisCollector(link))
        quotas = RedisQuotas(link)
        streams = RedisJournals(
            link, secret, ttl_s=kept.resume_ttl_s, max_bytes=kept.resume_max_bytes
        )
        tasks += [link.run(), quotas.run(), watch_leader(leases_in(link, secret), on_lease)]
    journal: Journal | None = None
    if kept.resume:
        journal = Journal(streams, secret, max_bytes=kept.resume_max_bytes)
        tasks.append(journal.run())
    async with asyncio.TaskGroup() as group:
        running = [group.create_task(each) for each in tasks]
        yield SharedState(quotas=quotas, journal=journal)
        for task in running:
            task.cancel()
