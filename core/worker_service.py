"""What every worker process does around its desk: listen, register, and leave in order."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

import grpc

from core import rpc
from core.admin import Admin
from core.drain import Drain, Leaver
from core.leader_watch import watch_leader
from core.messages import (
    CacheNews,
    Compatibility,
    Endpoint,
    HandOver,
    Turn,
    WorkerHello,
    WorkerRole,
)
from core.metrics.shared import FenceCollector, RedisCollector
from core.metrics.worker import WorkerCollector, WorkerState
from core.network import leader_finder, listen_as_worker
from core.process import ProcessContext
from core.registration import Registration
from core.store.connect import connect, leases_in
from core.tickets import load_secret

_GRACE_S = 1.0
_KNOWN_WITHIN_S = 10.0


class Desk(WorkerState, Leaver, Protocol):
    """The owner of a worker's state. `not_ready` says why no work is taken now."""

    async def run(self) -> None: ...
    def cache_news(self, whole: bool) -> CacheNews: ...
    def report_when_it_matters(self, report_now: Callable[[], None]) -> None: ...
    def not_ready(self) -> str | None: ...


class Turning(Protocol):
    """What a worker has besides that can serve either role."""

    @property
    def role(self) -> WorkerRole: ...
    def registered(self, registration: Registration) -> None: ...
    def turn(self, role: WorkerRole) -> None: ...


async def serve_worker(
    context: ProcessContext,
    stop: asyncio.Event,
    *,
    admin: Admin,
    desk: Desk,
    role: WorkerRole,
    compatibility: Compatibility,
    num_blocks: int,
    add_service: Callable[[grpc.aio.Server], None],
    on_drained: Callable[[], Awaitable[None]],
    local_prefill: bool = False,
    turning: Turning | None = None,
) -> None:
    """Serves until told to stop; then refuses new work, sees to what runs, and stops.

    What runs goes on at peers where the scheduler says that there are some, else it is finished.
    What is left at the end of the drain timeout is given up in any case: its gateways try again.
    With `turning` the worker serves either role, as it is told; `role` is the first one.
    """
    config = context.config
    server = rpc.server()
    add_service(server)
    address = listen_as_worker(server, context)
    hello = WorkerHello(
        endpoint=Endpoint(worker=context.me, address=address),
        role=role,
        compatibility=compatibility,
        num_blocks=num_blocks,
        max_seqs=config.engine.max_seqs,
        max_step_tokens=config.engine.max_step_tokens,
        local_prefill=local_prefill,
        admin_address=admin.address,
        elastic=turning is not None,
        model=context.models[0].name,
    )

    def obey(command: Turn | HandOver) -> None:
        match command:
            case Turn() if turning is not None:
                turning.turn(command.role)
            case HandOver():
                desk.hand_over()

    registration = Registration(
        leader_finder(context),
        hello,
        desk.load,
        interval_s=config.scheduler.report_interval_s,
        cache_news=desk.cache_news,
        on_command=obey,
        dial=context.dial,
    )
    desk.report_when_it_matters(registration.report_now)
    if turning is not None:
        turning.registered(registration)
    drain = Drain(desk, registration, timeout_s=config.drain_timeout_s)
    admin.routes.extend(drain.routes)
    collector = WorkerCollector(
        desk,
        lambda: turning.role if turning is not None else role,
        num_blocks=num_blocks,
        block_size=compatibility.block_size,
        vllm=admin.vllm,
    )
    admin.registry.register(collector)
    admin.registry.register(FenceCollector(context.fence))
    limit_s = config.telemetry.stalled_after_s
    admin.health.alive_if(lambda: _stalled(desk.stalled_s, limit_s))
    admin.health.ready_if(desk.not_ready)
    admin.health.ready_if(registration.not_known)
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(desk.run()), tasks.create_task(registration.run())]
        if (link := connect(config)) is not None:
            admin.registry.register(RedisCollector(link))
            leases = leases_in(link, load_secret(context.run_dir))
            running.append(tasks.create_task(link.run()))
            running.append(tasks.create_task(watch_leader(leases, registration.leader_heard)))
        await server.start()
        admin.health.started()
        # Whoever hears that the cluster serves finds this worker in it. A scheduler that is away,
        # or does not take the worker, is no reason to start it again.
        await _any_of(stop, drain.asked, registration.known, timeout_s=_KNOWN_WITHIN_S)
        context.mark_ready()
        await _any_of(stop, drain.asked)
        await drain.run()
        await stop.wait()
        await rpc.stop_server(server, _GRACE_S)
        for task in running:
            task.cancel()
    await on_drained()


async def _any_of(*events: asyncio.Event, timeout_s: float | None = None) -> None:
    waits = [asyncio.create_task(each.wait()) for each in events]
    try:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waits:
            each.cancel()


def _stalled(stalled_s: float, limit_s: float) -> str | None:
    if stalled_s <= limit_s:
        return None
    return f"the step loop has had work for {stalled_s:.0f} s and has not come round"
