"""A cluster on Ray: every process below an actor, placed by resources, restarted where it is lost.

join Ray · one placement group for all workers · scheduler on the head node · workers · gateways ·
wait until all serve · supervise, and add or remove workers as the demand wants · stop what was
started, in the order of a local cluster. Ray itself goes on, unless it was started here.
"""

import asyncio
import contextlib
import itertools
import os
import secrets
import signal
import socket
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from core.config import WILDCARD_HOSTS, ClusterConfig
from core.errors import ConfigError, Unavailable
from core.log import configure
from core.network import host_port
from core.ports import GATEWAY_NAME, gateway_name
from core.process import SCHEDULER_NAME
from core.tickets import SECRET_VARIABLE, secret_for_cluster
from deploy.lone import Role
from deploy.ray_host import RoleHost, Task
from deploy.ray_scaling import ROLES, Bounds, Change, Patience, WorkerRole, next_change, read

_PLACE_TIMEOUT_S = 60.0
_START_TIMEOUT_S = 300.0
_CALL_TIMEOUT_S = 30.0
_CONNECT_TIMEOUT_S = 5.0
_READY_LOOK_S = 5.0
_RESTART_PAUSE_S = 1.0
_LOOK_EVERY_S = 5.0
_HEAD = "node:__internal_head__"
_STOP_GRACE_S = 10.0


@dataclass(slots=True)
class _Host:
    """An actor of ours, and the task that keeps its process serving."""

    name: str
    role: Role
    actor: Any
    group: PlacementGroup | None = None  # its own, where it came later
    keeper: asyncio.Task[None] | None = None
    stopping: bool = False


class RayCluster:
    """`async with RayCluster(config, address="auto") as cluster:` serves inside the block.

    `address` is that of `ray.init`; None starts Ray on this machine, for as long as the block.
    Entering raises ConfigError where a setting will not do, and Unavailable where Ray, or room on
    its nodes, cannot be had.
    """

    def __init__(self, config: ClusterConfig, *, address: str | None = None) -> None:
        self._config = config
        self._address = address
        self._log = configure(config, "ray driver")
        self._hosts: dict[str, _Host] = {}
        self._group: PlacementGroup | None = None
        self._scheduler = ""
        self._secret = ""
        self._ports: dict[str, tuple[str, dict[str, int]]] = {}
        self._failed: asyncio.Future[None] | None = None
        self._scaler: asyncio.Task[None] | None = None
        self._numbers = {role: itertools.count() for role in ROLES}

    @property
    def config(self) -> ClusterConfig:
        """What the cluster is told."""
        return self._config

    @property
    def http_urls(self) -> list[str]:
        """Of each gateway: by its node's address, where it listens on every address."""
        scheme = "https" if self._config.gateway.tls_cert_file else "http"
        return [f"{scheme}://{host_port(host, ports['http'])}" for host, ports in self._gateways]

    @property
    def grpc_targets(self) -> list[str]:
        """Of each gateway."""
        return [host_port(host, ports["grpc"]) for host, ports in self._gateways]

    @property
    def admin_url(self) -> str:
        """The scheduler's own HTTP server, on the head node."""
        node, ports = self._ports[SCHEDULER_NAME]
        host = self._config.scheduler.admin_host
        return f"http://{host_port(node if host in WILDCARD_HOSTS else host, ports['admin'])}"

    @property
    def worker_names(self) -> list[str]:
        """Those that are to serve now."""
        return [host.name for host in self._hosts.values() if host.role in ROLES]

    async def __aenter__(self) -> Self:
        _check(self._config)
        self._failed = asyncio.get_running_loop().create_future()
        self._secret = _secret(self._config)
        await asyncio.to_thread(_join, self._address)
        try:
            await self._start()
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
        """Serves until a process cannot be kept up; raises the error that says why."""
        assert self._failed is not None
        await asyncio.shield(self._failed)

    def kill(self) -> None:
        """Ends every process now."""
        for host in self._hosts.values():
            host.stopping = True
            with contextlib.suppress(RayError):
                ray.kill(host.actor)

    def pass_on(self, number: signal.Signals) -> None:
        """Log levels are changed where the processes are: nothing is passed on to other nodes."""
        self._log.warning("a signal to the driver reaches no process", signal=number.name)

    @property
    def _gateways(self) -> list[tuple[str, dict[str, int]]]:
        names = (gateway_name(number) for number in range(self._config.gateways))
        listens_on = self._config.gateway.host
        return [
            (node if listens_on in WILDCARD_HOSTS else listens_on, ports)
            for node, ports in (self._ports[name] for name in names)
        ]

    async def _start(self) -> None:
        head = _head_node()
        bundle = self._bundle()
        count = sum(self._config.num_workers)
        self._group = await self._placed([bundle] * count, self._config.ray.placement)
        on_head = NodeAffinitySchedulingStrategy(node_id=head, soft=False)
        # Its address is told to everybody, so it stays on the node without which Ray is gone too.
        probe = _actor(0, 0, on_head).remote(Task(role="scheduler", name="", settings=""), "")
        found = await _answer(probe.node.remote(), _CALL_TIMEOUT_S)
        ray.kill(probe)
        port = self._config.network.port or int(found["port"])
        self._scheduler = host_port(str(found["host"]), port)
        self._add("scheduler", SCHEDULER_NAME, self._config, on_head, port=port)
        bundles = itertools.count()
        for model in self._config.each_model:
            own = self._config.of_model(model)
            for role, number in zip(ROLES, (own.prefill_workers, own.decode_workers), strict=True):
                for _ in range(number):
                    self._add_worker(role, own, self._group, next(bundles))
        for number in range(self._config.gateways):
            self._add("gateway", gateway_name(number), self._gateway_config(number), "SPREAD")
        await self._until_ready(list(self._hosts.values()))
        if self._config.ray.autoscale:
            self._scaler = asyncio.create_task(self._scale(), name="scale")

    def _bundle(self) -> dict[str, float]:
        own = self._config.ray
        gpus = own.gpus_per_worker
        if gpus is None:
            there = ray.cluster_resources()  # type: ignore[no-untyped-call]
            gpus = 1 if self._config.engine.device != "cpu" and there.get("GPU") else 0
        return {"CPU": float(own.cpus_per_worker), **({"GPU": float(gpus)} if gpus else {})}

    async def _placed(self, bundles: list[dict[str, float]], placement: str) -> PlacementGroup:
        """Room for these on the nodes. Raises Unavailable where there is none in time."""
        group: PlacementGroup = placement_group(bundles, strategy=placement.upper())
        try:
            await _answer(group.ready(), _PLACE_TIMEOUT_S)
        except TimeoutError:
            remove_placement_group(group)
            free = {
                name: amount
                for name, amount in ray.available_resources().items()  # type: ignore[no-untyped-call]
                if name in ("CPU", "GPU")
            }
            raise Unavailable(
                f"Ray has no room for {len(bundles)} workers of {bundles[0]} within "
                f"{_PLACE_TIMEOUT_S:.0f} s; free are {free}"
            ) from None
        except asyncio.CancelledError:
            remove_placement_group(group)
            raise
        return group

    def _gateway_config(self, number: int) -> ClusterConfig:
        """Several may come to one node, so each has ports of its own."""
        gateway = self._config.gateway
        ports = {
            name: port + number
            for name in ("http_port", "grpc_port")
            if (port := getattr(gateway, name))
        }
        return self._config.model_copy(update={"gateway": gateway.model_copy(update=ports)})

    def _add_worker(
        self, role: WorkerRole, config: ClusterConfig, group: PlacementGroup, bundle: int
    ) -> _Host:
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=bundle
        )
        return self._add(role, f"{role}-{next(self._numbers[role])}", config, strategy)

    def _add(
        self, role: Role, name: str, config: ClusterConfig, strategy: Any, *, port: int = 0
    ) -> _Host:
        works = role in ROLES
        bundle = self._bundle() if works else {"CPU": 0.0}
        task = Task(
            role=role,
            name=name,
            settings=config.model_dump_json(exclude_unset=True),
            scheduler="" if role == "scheduler" else self._scheduler,
            port=port,
            threads=max(1, int(bundle["CPU"])) if works else None,
        )
        actor = _actor(bundle["CPU"], bundle.get("GPU", 0.0), strategy)
        host = _Host(name=name, role=role, actor=actor.remote(task, self._secret))
        host.keeper = asyncio.create_task(self._keep(host), name=f"keep {name}")
        self._hosts[name] = host
        return host

    async def _keep(self, host: _Host) -> None:
        """Has the process serve while it is wanted, in one life of its actor after another."""
        while not host.stopping:
            try:
                ended: dict[str, str] = await _answer(host.actor.serve.remote(), None)
            except RayActorError as error:
                if host.stopping:
                    return
                if isinstance(error, ActorDiedError):
                    self._log.error("lost with its node; Ray starts it again", child=host.name)
                await asyncio.sleep(_RESTART_PAUSE_S)
                continue
            except RayError as error:
                self._fail(Unavailable(f"{host.name}: {type(error).__name__}"))
                return
            if "refused" in ended:
                self._fail(ConfigError(f"{host.name}: {ended['refused']}"))
            elif "failed" in ended:
                self._fail(Unavailable(f"{host.name}: {ended['failed']}"))
            return

    def _fail(self, error: Exception) -> None:
        if self._failed is not None and not self._failed.done():
            self._failed.set_exception(error)

    async def _until_ready(self, hosts: list[_Host]) -> None:
        async def one(host: _Host) -> None:
            while True:
                with contextlib.suppress(RayActorError):
                    ports = await _answer(host.actor.ready.remote(_READY_LOOK_S), None)
                    if ports is not None:
                        where = await _answer(host.actor.node.remote(), _CALL_TIMEOUT_S)
                        self._ports[host.name] = (str(where["host"]), ports)
                        self._log.info("ready", child=host.name, node=where["host"])
                        return
                    continue
                await asyncio.sleep(_RESTART_PAUSE_S)  # its actor is being started again

        failed = self._failed
        assert failed is not None
        waiting = [asyncio.create_task(one(host)) for host in hosts]
        everyone = asyncio.gather(*waiting)
        try:
            ends: set[asyncio.Future[Any]] = {everyone, failed}
            await asyncio.wait(
                ends,
                timeout=_START_TIMEOUT_S,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if failed.done():
                failed.result()
            if not everyone.done():
                late = [host.name for host in hosts if host.name not in self._ports]
                raise Unavailable(f"not ready within {_START_TIMEOUT_S:.0f} s: {', '.join(late)}")
            everyone.result()
        finally:
            everyone.cancel()
            await asyncio.gather(everyone, *waiting, return_exceptions=True)

    # --- as many workers as the demand wants --------------------------------------------------

    async def _scale(self) -> None:
        own = self._config.scheduler
        bounds = Bounds(
            least={"prefill": own.min_prefill_workers, "decode": own.min_decode_workers},
            most={"prefill": own.max_prefill_workers, "decode": own.max_decode_workers},
        )
        patience = Patience()
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            try:
                actor = self._hosts[SCHEDULER_NAME].actor
                found = await _answer(actor.wishes.remote(), _CALL_TIMEOUT_S)
                if found is None:
                    continue
                workers, wanted = read(found)
            except (RayError, TimeoutError, ValueError) as error:
                self._log.warning("cannot tell how many workers are wanted", why=repr(error))
                continue
            known = {worker.name for worker in workers}
            coming = sum(1 for name in self.worker_names if name not in known)
            change, patience = next_change(workers, wanted, bounds, patience, num_coming=coming)
            if change is not None:
                await self._apply(change)

    async def _apply(self, change: Change) -> None:
        if change.remove is not None:
            if (host := self._hosts.get(change.remove)) is not None:
                self._log.info("one worker less is wanted", child=host.name)
                await self._end([host])
            return
        self._log.info("one worker more is wanted", role=change.role)
        try:
            group = await self._placed([self._bundle()], "pack")
        except Unavailable as error:
            self._log.warning("no room for one more", why=str(error))
            return
        host = self._add_worker(change.role, self._config, group, 0)
        host.group = group

    # --- the end ------------------------------------------------------------------------------

    async def _stop(self) -> None:
        """The gateways drain while the workers still compute; the scheduler goes last."""
        try:
            if self._scaler is not None:
                self._scaler.cancel()
                await asyncio.gather(self._scaler, return_exceptions=True)
            for wanted in ((GATEWAY_NAME,), ROLES, (SCHEDULER_NAME,)):
                await self._end([h for h in self._hosts.values() if h.role in wanted])
        finally:
            self.kill()
            if self._group is not None:
                with contextlib.suppress(RayError):
                    remove_placement_group(self._group)
            if self._failed is not None and self._failed.done():
                self._failed.exception()  # whoever waits has it; here it only ends
            await asyncio.to_thread(ray.shutdown)

    async def _end(self, hosts: list[_Host]) -> None:
        """Drains, then ends the actors; what does not drain in time is killed."""
        for host in hosts:
            host.stopping = True
            with contextlib.suppress(RayError):
                host.actor.stop.remote()
        keepers = {host.keeper for host in hosts if host.keeper is not None}
        if keepers:
            await asyncio.wait(keepers, timeout=self._config.stop_s + _STOP_GRACE_S)
        for host in hosts:
            with contextlib.suppress(RayError):
                ray.kill(host.actor)
                if host.group is not None:
                    remove_placement_group(host.group)
            if host.keeper is not None:
                host.keeper.cancel()
            self._hosts.pop(host.name, None)
        await asyncio.gather(*keepers, return_exceptions=True)


def _check(config: ClusterConfig) -> None:
    """Raises ConfigError where the settings are not for a cluster on Ray."""
    if config.network.schedulers or config.network.advertise_host:
        raise ConfigError("network: on Ray the nodes' addresses are taken; set neither of them")
    if config.schedulers > 1:
        raise ConfigError("schedulers: on Ray there is one, which Ray starts again; set 1")
    if config.ray.autoscale and len(config.each_model) > 1:
        raise ConfigError("ray.autoscale: it is for one model; there are several")


def _secret(config: ClusterConfig) -> str:
    """The operator's, else a fresh one; as text, which is what a variable can hold."""
    if config.secret_file is None and SECRET_VARIABLE not in os.environ:
        return secrets.token_hex(32)
    try:
        return secret_for_cluster(config.secret_file).decode()
    except UnicodeDecodeError as error:
        raise ConfigError("secret_file: on Ray the secret must be text in UTF-8") from error


def _join(address: str | None) -> None:
    """Raises Unavailable where there is no Ray at the address."""
    _check_listens(address)
    options: dict[str, Any] = {"namespace": f"tandem-{secrets.token_hex(4)}"}
    if address is None:
        options["include_dashboard"] = False
    try:
        ray.init(address=address, **options)
    except (ConnectionError, RayError, RuntimeError, ValueError, TimeoutError) as error:
        where = f"at {address}" if address else "on this machine"
        raise Unavailable(f"no Ray {where}: {str(error).splitlines()[0]}") from error


def _check_listens(address: str | None) -> None:
    """Ray itself would try for minutes. Raises Unavailable where nobody listens at host:port."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise Unavailable(f"no Ray at {address}: {error}") from error


def _head_node() -> str:
    """The id of the head node. Raises Unavailable where no node says that it is."""
    for node in ray.nodes():  # type: ignore[no-untyped-call]
        if node["Alive"] and _HEAD in node["Resources"]:
            return str(node["NodeID"])
    raise Unavailable("Ray names no head node")


def _actor(num_cpus: float, num_gpus: float, strategy: Any) -> Any:
    return ray.remote(RoleHost).options(
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        scheduling_strategy=strategy,
        max_restarts=-1,
        max_concurrency=16,
    )


async def _answer(reference: Any, timeout_s: float | None) -> Any:
    """What a remote call gives. Raises TimeoutError, or what Ray says of a lost actor."""
    return await asyncio.wait_for(asyncio.wrap_future(reference.future()), timeout_s)
