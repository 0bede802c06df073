"""A whole cluster on this machine: one process per part, supervised, and nothing left behind.

check ports · make the models' cards · reap what dead launchers left · make the run directory
· start every process · wait until all serve · supervise · stop gateway, workers, scheduler
"""

import asyncio
import itertools
import signal
from types import TracebackType
from typing import Self

from core.config import ClusterConfig
from core.errors import ConfigError, Unavailable
from core.log import configure
from core.model_card import ModelCard
from core.network import host_port
from core.ports import gateway_name, scheduler_names
from core.process import SCHEDULER_NAME, STOP_GRACE_S
from core.served_models import ServedModel, served_models
from core.store.connect import redis_url
from deploy import environment
from deploy.child import Child
from deploy.model import prepare_card
from deploy.ports import check_ports
from deploy.roles import Roles
from deploy.run_dir import RunDir, reap_abandoned
from kv_transfer.shm import reap_orphans

# Loading a large model from a slow disk takes minutes.
_START_TIMEOUT_S = 300.0
# A child's own fuse burns after STOP_GRACE_S beyond the drain; the launcher waits a little longer.
_KILL_AFTER_S = STOP_GRACE_S + 2.0
_ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class LocalCluster:
    """`async with LocalCluster(config) as cluster:` serves inside the block.

    Entering raises ConfigError where a port, the model or a setting will not do, and Unavailable
    where a process cannot be brought to serve. The body should await `wait()`.
    """

    def __init__(
        self,
        config: ClusterConfig,
        *,
        roles: Roles | None = None,
    ) -> None:
        self._config = config
        self._roles = roles or Roles.of(config)
        self._log = configure(config, "launcher")
        self._run_dir: RunDir | None = None
        self._models: tuple[ServedModel, ...] = ()
        self._gateway: list[Child] = []
        self._workers: list[Child] = []
        self._scheduler: list[Child] = []

    @property
    def run_dir(self) -> RunDir:
        """Where the cluster's processes meet."""
        if self._run_dir is None:
            raise Unavailable("the cluster is not running")
        return self._run_dir

    @property
    def models(self) -> tuple[ServedModel, ...]:
        """What it serves."""
        return self._models

    @property
    def http_urls(self) -> list[str]:
        """Of each gateway, such as http://127.0.0.1:8000."""
        scheme = "https" if self._config.gateway.tls_cert_file else "http"
        return [f"{scheme}://{where}" for where in self._gateways_at("http")]

    @property
    def config(self) -> ClusterConfig:
        """What the cluster is told."""
        return self._config

    @property
    def grpc_targets(self) -> list[str]:
        """Of each gateway, such as 127.0.0.1:50051."""
        return self._gateways_at("grpc")

    @property
    def admin_url(self) -> str:
        """The scheduler's own HTTP server, such as http://127.0.0.1:8001."""
        port = self.run_dir.bound(SCHEDULER_NAME)["admin"]
        return f"http://{_authority(self._config.scheduler.admin_host, port)}"

    @property
    def num_workers(self) -> tuple[int, int]:
        """How many prefill workers and how many decode workers it has."""
        return self._config.num_workers

    async def __aenter__(self) -> Self:
        if self._config.network.schedulers:
            raise ConfigError(
                "network.schedulers is for `tandem run`; a cluster on one machine meets at sockets"
            )
        if self._config.internal_tls.cert_file is not None:
            raise ConfigError(
                "internal_tls is for `tandem run`; a cluster on one machine meets at sockets"
            )
        check_ports(self._config)
        redis_url(self._config)
        folders = [
            await prepare_card(model.model, self._roles.prepare)
            for model in self._config.each_model
        ]
        self._models = served_models(self._config, [ModelCard.load(each) for each in folders])
        reaped = [*reap_abandoned(), *reap_orphans()]
        if reaped:
            self._log.warning("removed what a dead cluster left", names=reaped)
        self._run_dir = RunDir.create(self._config, folders)
        try:
            self._start()
            await self._until_ready()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stop()

    async def wait(self) -> None:
        """Serves until a process can no longer be kept alive; raises the error that says why."""
        tasks = [child.task for child in self._children]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        done.pop().result()

    def kill(self) -> None:
        """Ends every process now. Whoever leaves the block then does not wait for the drain."""
        for child in self._children:
            child.kill()

    def pass_on(self, number: signal.Signals) -> None:
        """Sends a signal to every process that serves."""
        for child in self._children:
            if child.ready.is_set():
                child.send_signal(number)

    @property
    def _gateway_names(self) -> list[str]:
        return [gateway_name(number) for number in range(self._config.gateways)]

    def _gateways_at(self, port: str) -> list[str]:
        bound = [self.run_dir.bound(name)[port] for name in self._gateway_names]
        return [_authority(self._config.gateway.host, each) for each in bound]

    @property
    def _children(self) -> list[Child]:
        return [*self._gateway, *self._workers, *self._scheduler]

    def _start(self) -> None:
        light, heavy = environment.light(), environment.worker(self._config)
        for name in scheduler_names(self._config):
            self._scheduler.append(self._child(name, self._roles.scheduler, light))
        numbers = {kind: itertools.count() for kind in ("prefill", "decode")}
        for model in self._models:
            for count, kind, module in (
                (model.config.prefill_workers, "prefill", self._roles.prefill),
                (model.config.decode_workers, "decode", self._roles.decode),
            ):
                names = [f"{kind}-{next(numbers[kind])}" for _ in range(count)]
                self._workers += [self._child(name, module, heavy, model.name) for name in names]
        self._gateway += [
            self._child(name, self._roles.gateway, light) for name in self._gateway_names
        ]

    def _child(
        self, name: str, module: str, env: dict[str, str], model: str | None = None
    ) -> Child:
        return Child(
            name,
            module,
            run_dir=self.run_dir.path,
            environment=env,
            frozen_after_s=self._config.frozen_after_s,
            log=self._log,
            model=model,
        )

    async def _until_ready(self) -> None:
        failed = asyncio.create_task(self.wait())
        ready = asyncio.create_task(self._all_ready())
        try:
            await asyncio.wait(
                {failed, ready}, timeout=_START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
            )
            if failed.done():
                failed.result()
            if not ready.done():
                late = ", ".join(child.name for child in self._children if not child.ready.is_set())
                raise Unavailable(f"not ready within {_START_TIMEOUT_S:.0f} s: {late}")
        finally:
            failed.cancel()
            ready.cancel()
            await asyncio.gather(failed, ready, return_exceptions=True)

    async def _all_ready(self) -> None:
        for child in self._children:
            await child.ready.wait()

    async def _stop(self) -> None:
        """The gateway drains while the workers still compute; the scheduler goes last."""
        grace_s = self._config.stop_s + _KILL_AFTER_S
        try:
            for group in (self._gateway, self._workers, self._scheduler):
                await asyncio.gather(*(child.stop(grace_s) for child in group))
        finally:  # cut short: the tasks that are torn down with the event loop kill their children
            self.kill()
            self.run_dir.close()


def _authority(host: str, port: int) -> str:
    """host:port of a server as a client on this machine writes it."""
    host = _ANY_HOST.get(host, host)
    return host_port(host, port)
