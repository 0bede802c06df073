"""The scheduler process: `python -m scheduler`, started by a launcher."""

import asyncio

from core import log, process, rpc
from core.admin import authority, served
from core.health import Health
from core.listen import bind
from core.metrics.export import exported
from core.metrics.registry import new_registry
from core.metrics.shared import RedisCollector
from core.network import listen_as_scheduler
from core.ports import scheduler_admin_port_of, tell_ports, told_ports
from core.process import ProcessContext
from core.store.connect import connect, leases_in
from core.store.lease import Candidate, MemoryLeases
from core.telemetry.names import Role
from core.tickets import Tickets, load_secret
from protos.tandem.internal.v1 import scheduler_pb2_grpc
from scheduler.admin import create_admin_app
from scheduler.desk import SchedulerDesk
from scheduler.election import Election
from scheduler.front_desk import FrontDesk
from scheduler.leader_metrics import LeaderCollector
from scheduler.leadership import Leadership
from scheduler.metrics import ClusterCollector
from scheduler.service import SchedulerService
from scheduler.spans import QueueSpans
from scheduler.split_file import SplitFile

_GRACE_S = 1.0


async def main(context: ProcessContext, stop: asyncio.Event) -> None:
    """Serves until told to stop."""
    config = context.config.scheduler
    log.configure(context.config, context.me.name)
    secret = load_secret(context.run_dir)
    tickets, spans = Tickets(secret, fence=context.fence), QueueSpans(context.tracer)
    desk = FrontDesk(
        [
            SchedulerDesk(
                model.config.scheduler,
                model.name,
                tickets,
                spans=spans,
                step_target_s=model.config.engine.itl_target_s,
                kept_split=SplitFile(context.run_dir / f"split-{number}.json"),
            )
            for number, model in enumerate(context.models)
        ]
    )
    leadership = Leadership(context.me, context.fence, leads=False)
    service = SchedulerService(desk, context.me, leadership)
    server = rpc.server()
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(service, server)
    address = listen_as_scheduler(server, context)
    name = context.me.name
    admin_port = scheduler_admin_port_of(context.config, name)
    admin_port = admin_port or told_ports(context.run_dir, name).get("admin", 0)
    listener = bind(config.admin_host, admin_port, "scheduler.admin_port")
    port = int(listener.getsockname()[1])
    admin_address = authority(config.admin_host, port, context.config.network.advertise_host)
    registry, health = new_registry(context.me, context.model_names, context.tracer), Health()
    configured = {
        model.name: (model.config.prefill_workers, model.config.decode_workers)
        for model in context.models
    }
    registry.register(ClusterCollector(desk, configured, context.me))
    link = connect(context.config)
    if link is not None:
        registry.register(RedisCollector(link))

    def on_term(token: int) -> None:
        if token:
            desk.takes_over()
            leadership.begin(token)
        else:
            leadership.end(election.leader)

    election = Election(
        MemoryLeases() if link is None else leases_in(link, secret),
        Candidate(holder=str(context.me), address=address, admin_address=admin_address),
        lease_s=context.config.redis.lease_s,
        alone=context.config.num_schedulers == 1,
        on_term=on_term,
    )
    leadership.on_heard = election.heard
    registry.register(LeaderCollector(election))
    health.ready_if(lambda: _not_ready(desk, election))
    app = create_admin_app(desk, registry, health, admin_address, own_name=name, election=election)
    await election.step()
    await server.start()
    async with (
        asyncio.TaskGroup() as tasks,
        served(app, listener),
        exported(context, registry),
    ):
        deciding = tasks.create_task(desk.run())
        linked = tasks.create_task(link.run()) if link is not None else None
        standing = tasks.create_task(election.run())
        tell_ports(context.run_dir, name, {"admin": port})
        health.started()
        context.mark_ready()
        await stop.wait()
        standing.cancel()
        await asyncio.wait({standing})  # another may lead now
        await rpc.stop_server(server, _GRACE_S)
        deciding.cancel()
        if linked is not None:
            linked.cancel()


def _not_ready(desk: FrontDesk, election: Election) -> str | None:
    """One that stands by is ready where it knows for whom."""
    if election.leads:
        return desk.unable()
    return None if election.leader is not None else "no scheduler leads, as far as is known here"


if __name__ == "__main__":
    process.run(main, Role.SCHEDULER)
