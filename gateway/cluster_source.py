"""The cluster as the scheduler sees it, asked for at its admin port when an operator looks."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx

from core.admin import authority
from core.errors import Unavailable
from core.network import host_port
from core.ports import scheduler_names, told_ports
from core.process import ProcessContext

_TIMEOUT_S = 2.0


class ClusterSource:
    """Owns the connections, which are made when they are first needed."""

    def __init__(self, context: ProcessContext) -> None:
        self._context = context
        self._http: httpx.AsyncClient | None = None

    async def cluster(self) -> dict[str, Any]:
        """What /cluster of the scheduler that leads says. Raises Unavailable where none does."""
        if self._http is None:
            # Proxies of the environment are not asked: the schedulers are of us.
            self._http = httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False)
        found: list[str] = []
        for address in scheduler_admins(self._context):
            try:
                response = await self._http.get(f"http://{address}/cluster")
                response.raise_for_status()
                told: dict[str, Any] = response.json()
                if told["leader"]["leads"]:
                    return told
                found.append(f"{address} stands by")
            except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
                found.append(f"{address}: {error or type(error).__name__}")
        raise Unavailable(f"no scheduler that leads: {', '.join(found)}")

    async def close(self) -> None:
        """Closes the connections. Idempotent."""
        http, self._http = self._http, None
        if http is not None:
            await http.aclose()


def scheduler_admins(context: ProcessContext) -> list[str]:
    """host:port of each scheduler's admin server, as this process reaches it."""
    config = context.config
    if config.network.schedulers:
        hosts = [each.rpartition(":")[0].strip("[]") for each in config.network.schedulers]
        return [host_port(host, config.scheduler.admin_port) for host in hosts]
    ports = [told_ports(context.run_dir, name).get("admin") for name in scheduler_names(config)]
    return [authority(config.scheduler.admin_host, port) for port in ports if port]


@contextlib.asynccontextmanager
async def cluster_source(context: ProcessContext) -> AsyncIterator[ClusterSource]:
    """A source that is closed with the context."""
    source = ClusterSource(context)
    try:
        yield source
    finally:
        await source.close()
