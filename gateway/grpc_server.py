"""The public gRPC server: its services, standard health, reflection, and channelz where asked."""

from collections.abc import Sequence
from typing import NoReturn, Protocol

import grpc
from grpc_channelz.v1 import channelz, channelz_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from core import rpc
from core.config import GatewayConfig
from core.errors import ConfigError, Unsupported
from gateway.grpc_call import Context, fail

# The server as a whole, in the words of the health protocol.
_WHOLE = ""
_HEALTH_SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_CHANNELZ_SERVICE = channelz_pb2.DESCRIPTOR.services_by_name["Channelz"].full_name


class GrpcService(Protocol):
    """A service as the server takes it."""

    # Its full name, as in a call's path.
    name: str

    def handlers(self) -> grpc.GenericRpcHandler:
        """What answers its calls."""
        ...


class PublicGrpcServer:
    """One server on one port, not started yet. `port` is the bound one, also where 0 was asked.

    The first interceptor sees a call first. With credentials it speaks TLS only. Raises ConfigError
    where the port cannot be had.
    """

    def __init__(
        self,
        services: Sequence[GrpcService],
        config: GatewayConfig,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        self._server = grpc.aio.server(interceptors=interceptors, options=_options(config))
        self._names = [_WHOLE, *(service.name for service in services)]
        self._server.add_generic_rpc_handlers([service.handlers() for service in services])
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        told = [*self._names[1:], _HEALTH_SERVICE, reflection.SERVICE_NAME]
        if config.channelz:
            channelz.add_channelz_servicer(self._server)
            told.append(_CHANNELZ_SERVICE)
        reflection.enable_server_reflection(told, self._server)
        self._server.add_generic_rpc_handlers([_Unknown()])
        self.port = _bind(self._server, config, credentials)

    async def start(self) -> None:
        """Takes calls; health says NOT_SERVING until `set_serving`."""
        await self.set_serving(False)
        await self._server.start()

    async def set_serving(self, serving: bool) -> None:
        """What health checks are told, of each service and of the whole server."""
        status = health_pb2.HealthCheckResponse
        for name in self._names:
            await self._health.set(name, status.SERVING if serving else status.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Takes no more calls, and cancels those that outlast the grace."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)


class _Unknown(grpc.GenericRpcHandler):
    """Answers for every method that no other handler knows; gRPC itself would give no details."""

    def service(self, details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[bytes, bytes]":
        async def refuse(request: bytes, context: Context) -> NoReturn:
            error = Unsupported(f"there is no method {details.method}")
            await fail(context, error, grpc.StatusCode.UNIMPLEMENTED)
            raise error

        return grpc.unary_unary_rpc_method_handler(refuse)


def _options(config: GatewayConfig) -> list[tuple[str, int]]:
    """What the transport holds clients to."""
    own = {
        # The product's own limit on a message answers with details; this one is for the rest.
        "grpc.max_receive_message_length": 2 * config.max_body_bytes,
        "grpc.max_concurrent_streams": config.max_concurrent_streams,
        "grpc.enable_channelz": int(config.channelz),
    }
    if config.max_connection_age_s:
        own["grpc.max_connection_age_ms"] = round(config.max_connection_age_s * 1000)
        own["grpc.max_connection_age_grace_ms"] = round(config.max_connection_age_grace_s * 1000)
    return list((dict(rpc.PUBLIC_SERVER_OPTIONS) | own).items())


def _bind(
    server: grpc.aio.Server, config: GatewayConfig, credentials: grpc.ServerCredentials | None
) -> int:
    host = f"[{config.host}]" if ":" in config.host else config.host
    address = f"{host}:{config.grpc_port}"
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError:
        port = 0
    if not port:
        raise ConfigError(f"port {config.grpc_port} on {config.host} is in use (gateway.grpc_port)")
    return port
