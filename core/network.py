"""How the processes of a cluster find each other.

Where one launcher started them all they meet at Unix sockets in its run directory, which is their
user's alone. Elsewhere (`network.schedulers` is set) they listen on TCP: the scheduler at an
address that everybody is told, the workers wherever they like, since each tells the scheduler.
"""

import grpc

from core.errors import ConfigError
from core.internal_tls import InternalTls
from core.leader_finder import LeaderFinder
from core.ports import scheduler_names
from core.process import ProcessContext, socket_address


def leader_finder(context: ProcessContext) -> LeaderFinder:
    """Finds the scheduler that leads, among those that are configured."""
    config = context.config
    addresses = config.network.schedulers or [
        _scheduler_socket(context, name) for name in scheduler_names(config)
    ]
    return LeaderFinder(addresses, context.fence, several=config.num_schedulers > 1)


def listen_as_scheduler(server: grpc.aio.Server, context: ProcessContext) -> str:
    """Binds the server to where everybody looks for it; gives the gRPC target of this one.

    It is the same in each of its lives. Raises ConfigError where it cannot be had.
    """
    network = context.config.network
    if not network.schedulers:
        address = _scheduler_socket(context, context.me.name)
        _bind(server, address, str(context.run_dir))
        return address
    port = network.port or int(network.schedulers[0].rpartition(":")[2])
    bound = _bind(
        server,
        host_port(network.listens_on, port),
        "network.host, network.port, network.schedulers",
        context.tls,
    )
    return host_port(network.reached_at, bound)


def _scheduler_socket(context: ProcessContext, name: str) -> str:
    return f"unix:{context.run_dir}/{name}.sock"


def listen_as_worker(server: grpc.aio.Server, context: ProcessContext) -> str:
    """Binds the server; gives the gRPC target that others reach it by.

    The incarnation, or a port that the system chooses, keeps lives apart. Raises ConfigError.
    """
    network = context.config.network
    if not network.schedulers:
        address = socket_address(context.run_dir, context.me)
        _bind(server, address, str(context.run_dir))
        return address
    wanted = host_port(network.listens_on, network.port)
    bound = _bind(server, wanted, "network.host, network.port", context.tls)
    return host_port(network.reached_at, bound)


def host_port(host: str, port: int) -> str:
    """host:port; an IPv6 address goes in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _bind(
    server: grpc.aio.Server, address: str, setting: str, tls: InternalTls | None = None
) -> int:
    try:
        if tls is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, tls.server)
    except RuntimeError:
        port = 0
    if port == 0:
        raise ConfigError(f"cannot listen on {address} ({setting})")
    return port
