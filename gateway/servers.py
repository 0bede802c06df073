"""Runs both public servers in one event loop, once both ports are known to be free."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import uvicorn
from starlette.types import ASGIApp

from core.config import GatewayConfig
from core.listen import HttpServer, bind
from gateway.grpc_server import GrpcService, PublicGrpcServer
from gateway.http_protocol import BoundedHttpProtocol
from gateway.tls import Tls

_KEEP_ALIVE_S = 75


@dataclass(slots=True, kw_only=True)
class Serving:
    """The servers while they run."""

    http_port: int
    grpc_port: int
    tls: Tls | None
    _grpc: PublicGrpcServer
    _http: HttpServer
    _drain_timeout_s: float
    _stopping: asyncio.Task[None] | None = None

    def close_doors(self) -> None:
        """Takes no more connections and calls; what runs goes on. Idempotent.

        gRPC connections are told so (GOAWAY), idle HTTP connections are closed, and each other one
        after the answer that is under way.
        """
        if self._stopping is None:
            self._http.should_exit = True
            self._stopping = asyncio.create_task(self._grpc.stop(self._drain_timeout_s))

    async def closed(self) -> None:
        """Until no call is under way any more, at most for the drain timeout."""
        self.close_doors()
        assert self._stopping is not None
        await self._stopping

    async def follow(self, readiness: AsyncIterator[bool]) -> None:
        """Tells gRPC health checks what comes; HTTP asks the app's own readiness."""
        async for ready in readiness:
            await self._grpc.set_serving(ready)


@asynccontextmanager
async def serve(
    config: GatewayConfig,
    app: ASGIApp,
    services: Sequence[GrpcService],
    *,
    drain_timeout_s: float,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
) -> AsyncIterator[Serving]:
    """Serves HTTP and gRPC while the context lasts; leaving it drains both.

    Raises ConfigError where a port is in use or the TLS files will not do, before anything is
    started. Requests that run on leaving have `drain_timeout_s` to end. If a server fails, the
    context's body is cancelled.
    """
    tls = Tls.of(config)
    watching = asyncio.create_task(tls.watch()) if tls is not None else None
    listener = bind(config.host, config.http_port, "gateway.http_port")
    try:
        credentials = tls.grpc if tls else None
        grpc_server = PublicGrpcServer(services, config, interceptors, credentials)
        http_server = HttpServer(_http_config(app, tls, drain_timeout_s))
        await grpc_server.start()
        http_task = asyncio.create_task(http_server.serve(sockets=[listener]))
        http_task.add_done_callback(_cancel_on_failure(asyncio.current_task()))
        serving = Serving(
            http_port=listener.getsockname()[1],
            grpc_port=grpc_server.port,
            tls=tls,
            _grpc=grpc_server,
            _http=http_server,
            _drain_timeout_s=drain_timeout_s,
        )
        try:
            yield serving
        finally:
            await serving.closed()
            await http_task
    finally:
        listener.close()
        if watching is not None:
            watching.cancel()


def _cancel_on_failure(
    owner: asyncio.Task[object] | None,
) -> Callable[[asyncio.Task[None]], None]:
    """Wakes who relies on a server that died; its own error is raised as the context ends."""

    def on_end(server: asyncio.Task[None]) -> None:
        if owner is not None and not server.cancelled() and server.exception() is not None:
            owner.cancel()

    return on_end


def _http_config(app: ASGIApp, tls: Tls | None, drain_timeout_s: float) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=BoundedHttpProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        ssl_context_factory=(lambda *_: tls.http) if tls else None,
        # Its lines are not structured; what they tell is told by the request's record.
        log_level="critical",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(drain_timeout_s)),
    )
