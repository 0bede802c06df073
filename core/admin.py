"""The admin server of each process: metrics and health, on a port of its own.

It is for operators and their probes: it asks for no key, and listens on this machine alone unless
the configuration says otherwise. It runs on the process's event loop, so that an answer is proof
that the loop turns; a probe takes silence past its timeout for an answer, too.
"""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import uvicorn
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from core.config import WILDCARD_HOSTS
from core.health import Check, Health
from core.listen import HttpServer, bind
from core.metrics.export import exported
from core.metrics.registry import exposition, new_registry
from core.metrics.vllm import Labelled
from core.network import host_port
from core.ports import admin_port_of, tell_ports
from core.process import ProcessContext


@dataclass(frozen=True, slots=True, kw_only=True)
class Admin:
    """The server while it runs. `address` is host:port as a scraper writes it."""

    registry: CollectorRegistry
    vllm: Labelled
    health: Health
    port: int
    address: str
    # What it serves; a process may add to it.
    routes: list[BaseRoute]


def admin_routes(registry: CollectorRegistry, health: Health) -> list[BaseRoute]:
    """GET /metrics, /livez, /readyz and /startupz."""

    async def metrics(request: Request) -> Response:
        return Response(exposition(registry), headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})

    def probe(check: Check) -> Response:
        reason = check()
        return JSONResponse(
            {"ok": reason is None, "reason": reason or ""}, 200 if reason is None else 503
        )

    async def livez(request: Request) -> Response:
        return probe(health.not_alive)

    async def readyz(request: Request) -> Response:
        return probe(health.not_ready)

    async def startupz(request: Request) -> Response:
        return probe(health.not_started)

    return [Route(f"/{page.__name__}", page) for page in (metrics, livez, readyz, startupz)]


@asynccontextmanager
async def served(app: ASGIApp, listener: socket.socket) -> AsyncIterator[None]:
    """Serves the app on a bound socket while the context lasts, and closes the socket."""
    server = HttpServer(
        uvicorn.Config(
            app, access_log=False, log_config=None, lifespan="off", timeout_graceful_shutdown=1
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        server.should_exit = True
        await serving
        listener.close()


@asynccontextmanager
async def serve_admin(context: ProcessContext) -> AsyncIterator[Admin]:
    """The admin server of a gateway or a worker, from before it loads anything to its very end.

    Its port is told in the process's file in the run directory (`core.ports`). Raises ConfigError
    where the port cannot be had.
    """
    config, name = context.config, context.me.name
    host = config.telemetry.admin_host
    listener = bind(host, admin_port_of(context.cluster, name), "telemetry.admin_port")
    port = int(listener.getsockname()[1])
    model = context.model_names
    registry, health = new_registry(context.me, model, context.tracer), Health()
    app = Starlette(routes=admin_routes(registry, health))
    async with served(app, listener), exported(context, registry):
        tell_ports(context.run_dir, name, {"admin": port})
        yield Admin(
            registry=registry,
            vllm=Labelled(registry, context.me, model),
            health=health,
            port=port,
            address=authority(host, port, config.network.advertise_host),
            routes=app.router.routes,
        )


def authority(host: str, port: int, advertised: str | None = None) -> str:
    """host:port for others: IPv6 goes in brackets.

    A wildcard becomes the address that is advertised, else this machine's name.
    """
    if host in WILDCARD_HOSTS:
        host = advertised or socket.gethostname()
    return host_port(host, port)
