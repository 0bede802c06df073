"""One process of a cluster on whatever node Ray has put it: an actor that supervises it there.

The actor does what `tandem run` does: the process below it is restarted under a new incarnation
when it dies, and killed when it stands still. Where the actor itself is lost, with its node say,
Ray starts it again elsewhere, and its process ends with it. Nothing runs before `serve` is called:
Ray calls the constructor again after a loss, and nobody else.
"""

import asyncio
import os
import socket
from dataclasses import dataclass
from typing import Any

import httpx
import ray.util

from core.config import ClusterConfig
from core.errors import ConfigError, TandemError, Unavailable
from core.tickets import SECRET_VARIABLE
from deploy.lone import LoneProcess, Role

_WISHES_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a host is to run. `settings` is the cluster's configuration as JSON."""

    role: Role
    name: str
    settings: str
    # host:port of the scheduler; empty for a scheduler, which listens on `port` of its node.
    scheduler: str = ""
    port: int = 0
    threads: int | None = None


class RoleHost:
    """Made into an actor by `deploy.ray_cluster`. Every answer is plain data, errors as well."""

    def __init__(self, task: Task, secret: str) -> None:
        os.environ[SECRET_VARIABLE] = secret
        self._task = task
        self._process: LoneProcess | None = None
        self._serving: asyncio.Task[dict[str, str]] | None = None
        self._entered = asyncio.Event()
        self._stopping = asyncio.Event()

    async def node(self) -> dict[str, Any]:
        """The address of the host's node, and a port that is free there now."""
        with socket.socket() as any_free:
            any_free.bind(("", 0))
            return {"host": _address_of_node(), "port": any_free.getsockname()[1]}

    async def serve(self) -> dict[str, str]:
        """Until `stop` is called: {}. `refused` or `failed` says why it could not be kept up.

        Who lost the connection asks again: the process that serves is not started twice.
        """
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve())
        return await asyncio.shield(self._serving)

    async def _serve(self) -> dict[str, str]:
        try:
            async with LoneProcess(self._task.role, self._config(), name=self._task.name) as own:
                self._process = own
                self._entered.set()
                ended = asyncio.create_task(own.wait())
                stop = asyncio.create_task(self._stopping.wait())
                try:
                    await asyncio.wait({ended, stop}, return_when=asyncio.FIRST_COMPLETED)
                    if ended.done():
                        ended.result()
                finally:
                    stop.cancel()
                    ended.cancel()
        except ConfigError as error:
            return {"refused": str(error)}
        except TandemError as error:
            return {"failed": str(error)}
        finally:
            self._entered.clear()
            self._process = None
        return {}

    async def ready(self, timeout_s: float) -> dict[str, int] | None:
        """The ports that the process has bound, once it serves; None: not within the time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._entered.wait()
                assert self._process is not None
                await self._process.ready.wait()
                return self._process.ports()
        except (TimeoutError, Unavailable):
            return None

    async def stop(self) -> None:
        """Lets the process drain and end; `serve` then returns."""
        self._stopping.set()

    async def wishes(self) -> dict[str, Any] | None:
        """What the scheduler on this node says under /scale; None where it does not answer."""
        ports = self._process.ports() if self._process is not None else {}
        if "admin" not in ports:
            return None
        url = f"http://127.0.0.1:{ports['admin']}/scale"
        try:
            async with httpx.AsyncClient(timeout=_WISHES_TIMEOUT_S, trust_env=False) as client:
                answer = await client.get(url)
                answer.raise_for_status()
                found: dict[str, Any] = answer.json()
                return found
        except (httpx.HTTPError, ValueError):
            return None

    def _config(self) -> ClusterConfig:
        """The cluster's settings as a process on this node is to have them."""
        config = ClusterConfig.model_validate_json(self._task.settings)
        here = _address_of_node()
        network = {
            **config.network.model_dump(exclude_unset=True),
            "schedulers": (self._task.scheduler or f"{here}:{self._task.port}",),
            "advertise_host": here,
        }
        sections: dict[str, object] = {
            "network": type(config.network)(**network),
            "transfer": config.transfer.model_copy(update={"tcp_host": here}),
        }
        if self._task.threads is not None and config.engine.threads is None:
            sections["engine"] = config.engine.model_copy(update={"threads": self._task.threads})
        # The secret came with the task; its file may not be on this node.
        return config.model_copy(update={**sections, "secret_file": None})


def _address_of_node() -> str:
    found: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return found
