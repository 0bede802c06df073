"""The admin port: the scheduler's view of the cluster, for people, tests and Prometheus."""

from collections import Counter
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Response
from prometheus_client import CollectorRegistry

from core.admin import admin_routes
from core.health import Health
from core.messages import BlockCounts, WorkerLoad
from core.process import SCHEDULER_NAME
from scheduler.cluster import Member
from scheduler.desk import SchedulerDesk
from scheduler.election import Election
from scheduler.front_desk import FrontDesk
from scheduler.policy import not_ready
from scheduler.scale import scale_routes
from scheduler.targets import as_http_sd, scrape_targets


def create_admin_app(
    desk: FrontDesk,
    registry: CollectorRegistry,
    health: Health,
    own_address: str,
    *,
    own_name: str = SCHEDULER_NAME,
    election: Election | None = None,
) -> FastAPI:
    """GET /cluster, /scale, /sd, /healthz, /readyz and what every admin server has; POST /scale.

    A scheduler that stands by sends who asks for /scale to the one that leads.
    """
    app = FastAPI(title="Tandem admin", docs_url=None, redoc_url=None)

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """The event loop answers."""
        return {"status": "ok"}

    @app.get("/readyz")
    async def readyz(response: Response) -> dict[str, object]:
        """Whether a request could be placed, and how many workers take work; also by model.

        A scheduler that stands by is ready where it knows who leads.
        """
        models = [_readiness(each) for each in desk.desks.values()]
        leads = election is None or election.leads
        reason = desk.unable() if leads else health.not_ready()
        response.status_code = 200 if reason is None else 503
        return {
            "ready": reason is None,
            "reason": reason or "",
            "leads": leads,
            "prefill": sum(model["prefill"] for model in models),
            "decode": sum(model["decode"] for model in models),
            "models": models,
        }

    @app.get("/cluster")
    async def cluster() -> dict[str, Any]:
        """The queues, and each worker with its block pool by state."""
        desks = desk.desks.values()
        placements = sum((each.num_placements for each in desks), start=Counter())
        return {
            "leader": _leader(election),
            "num_queued": sum(each.num_queued for each in desks),
            "num_placed": sum(len(each.cluster.held) for each in desks),
            "placements": {kind: placements[kind] for kind in ("disaggregated", "local")},
            "models": [
                {
                    **_readiness(each),
                    "num_queued": each.num_queued,
                    "num_placed": len(each.cluster.held),
                    "placements": dict(each.num_placements),
                }
                for each in desks
            ],
            "scrape_targets": [
                asdict(each) for each in scrape_targets(desk, own_address, own_name)
            ],
            "workers": [_described(key, member) for key, member in sorted(desk.members.items())],
        }

    @app.get("/sd")
    async def sd() -> list[dict[str, Any]]:
        """Every process to scrape, as Prometheus' http_sd_configs read it."""
        return as_http_sd(scrape_targets(desk, own_address, own_name))

    app.router.routes.extend([*admin_routes(registry, health), *scale_routes(desk, election)])
    return app


def _leader(election: Election | None) -> dict[str, object]:
    """Whether this scheduler leads, under which token, and who does where it is another."""
    if election is None:
        return {"leads": True, "token": 0, "leader": "", "admin_address": ""}
    other = election.leader
    return {
        "leads": election.leads,
        "token": election.token or (other.token if other is not None else 0),
        "leader": other.leader.holder if other is not None else "",
        "admin_address": other.leader.admin_address if other is not None else "",
    }


def _readiness(desk: SchedulerDesk) -> dict[str, Any]:
    view = desk.cluster.view()
    reason = not_ready(view)
    return {
        "model": desk.model,
        "ready": reason is None,
        "reason": reason or "",
        "prefill": len(view.prefills),
        "decode": len(view.decodes),
    }


def _described(key: str, member: Member) -> dict[str, Any]:
    hello = member.hello
    load = member.load or WorkerLoad(blocks=BlockCounts(free=0), num_running=0, num_waiting=0)
    return {
        "worker": key,
        "role": hello.role.name.lower(),
        "model": hello.model,
        "local_prefill": hello.local_prefill,
        "admin_address": hello.admin_address,
        "num_blocks": hello.num_blocks,
        "blocks": asdict(load.blocks),
        "num_running": load.num_running,
        "num_waiting": load.num_waiting,
        "num_preempted": load.num_preempted,
        "backlog_tokens": load.backlog_tokens,
        "prefill_tokens_per_s": load.prefill_tokens_per_s,
        "step_s": load.step_s,
        "draining": load.draining,
        "counters": {counter.name: counter.value for counter in load.counters},
    }
