"""One process of a cluster whose others are elsewhere: in other containers, or on other machines.

It is supervised as in a local cluster: restarted under a new incarnation when it dies, and killed
when its event loop stands still, which is the proof that its peers wait for.
"""

import asyncio
import os
import signal
from types import TracebackType
from typing import Literal, Self

from core.config import ClusterConfig
from core.errors import ConfigError, Unavailable
from core.log import configure
from core.ports import told_ports
from core.process import STOP_GRACE_S
from core.tickets import SECRET_VARIABLE
from deploy import environment
from deploy.child import Child
from deploy.model import prepare_card
from deploy.roles import Roles
from deploy.run_dir import RunDir, reap_abandoned
from kv_transfer.shm import reap_orphans

Role = Literal["gateway", "scheduler", "prefill", "decode"]
_KILL_AFTER_S = STOP_GRACE_S + 2.0
_WORKERS = frozenset({"prefill", "decode"})


class LoneProcess:
    """`async with LoneProcess("decode", config, name=…) as process: await process.wait()`.

    Entering raises ConfigError where a setting or the model will not do. It does not wait until the
    process serves: its admin server tells that (`/startupz`).
    """

    def __init__(
        self, role: Role, config: ClusterConfig, *, name: str, roles: Roles | None = None
    ) -> None:
        self._role = role
        self._config = config
        self._name = name
        self._roles = roles or Roles.of(config)
        self._log = configure(config, f"{name} launcher")
        self._child: Child | None = None
        self._run_dir: RunDir | None = None

    async def __aenter__(self) -> Self:
        _check(self._config)
        folders = [
            await prepare_card(model.model, self._roles.prepare)
            for model in self._config.each_model
        ]
        reaped = [*reap_abandoned(), *reap_orphans()]
        if reaped:
            self._log.warning("removed what a dead process left", names=reaped)
        self._run_dir = RunDir.create(self._config, folders)
        works = self._role in _WORKERS
        self._child = Child(
            self._name,
            getattr(self._roles, self._role),
            run_dir=self._run_dir.path,
            environment=environment.lone_worker(self._config) if works else environment.light(),
            frozen_after_s=self._config.frozen_after_s,
            log=self._log,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._child is not None and self._run_dir is not None
        try:
            await self._child.stop(self._config.stop_s + _KILL_AFTER_S)
        finally:
            self._child.kill()
            self._run_dir.close()

    async def wait(self) -> None:
        """Until the process can no longer be kept alive; raises the error that says why."""
        assert self._child is not None
        await asyncio.wait({self._child.task})
        self._child.task.result()

    @property
    def ready(self) -> asyncio.Event:
        """Set while the process serves."""
        if self._child is None:
            raise Unavailable(f"{self._name} is not running")
        return self._child.ready

    def ports(self) -> dict[str, int]:
        """The ports that the process has bound, by name; nothing before it has."""
        return told_ports(self._run_dir.path, self._name) if self._run_dir is not None else {}

    def kill(self) -> None:
        """Ends the process now."""
        if self._child is not None:
            self._child.kill()

    def pass_on(self, number: signal.Signals) -> None:
        """Sends a signal to the process if it serves."""
        if self._child is not None and self._child.ready.is_set():
            self._child.send_signal(number)


def _check(config: ClusterConfig) -> None:
    """Raises ConfigError where processes on several machines could not work together."""
    if not config.network.schedulers:
        raise ConfigError("network.schedulers is needed: host:port where the scheduler listens")
    if config.secret_file is None and SECRET_VARIABLE not in os.environ:
        raise ConfigError(
            f"secret_file is needed, or {SECRET_VARIABLE}: the secret that all processes of the "
            "cluster share"
        )
