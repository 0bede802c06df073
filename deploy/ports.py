"""Finds out before anything starts whether the ports that were chosen can be had."""

import errno
import os
import socket
from dataclasses import dataclass

from core.config import ClusterConfig
from core.errors import ConfigError
from core.ports import gateway_name, public_ports_of, scheduler_admin_port_of, scheduler_names

_LAST_PORT = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """A port that the configuration asks for, with the words to ask for another.

    `flag` is empty where the command line has none.
    """

    number: int
    setting: str
    flag: str
    host: str
    host_setting: str


def public_ports(config: ClusterConfig) -> list[Port]:
    """HTTP and gRPC of each gateway, and admin of each scheduler."""
    gateway, scheduler = config.gateway, config.scheduler
    _fits(gateway.http_port, config.gateways, "gateway.http_port")
    _fits(gateway.grpc_port, config.gateways, "gateway.grpc_port")
    of_each = [public_ports_of(config, gateway_name(number)) for number in range(config.gateways)]
    rows = [
        (port, f"gateway.{name}_port", gateway.host, "gateway.host")
        for ports in of_each
        for name, port in ports.items()
    ]
    rows += [
        (
            scheduler_admin_port_of(config, name),
            "scheduler.admin_port",
            scheduler.admin_host,
            "scheduler.admin_host",
        )
        for name in scheduler_names(config)
    ]
    return [
        Port(
            number=number,
            setting=setting,
            flag=f"--{setting.partition('.')[2].replace('_', '-')}",
            host=host,
            host_setting=host_setting,
        )
        for number, setting, host, host_setting in rows
    ]


def admin_ports(config: ClusterConfig) -> list[Port]:
    """Those of gateways and workers, where they were chosen. Raises ConfigError past the last."""
    first, host = config.telemetry.admin_port, config.telemetry.admin_host
    num_ports = config.gateways + sum(config.num_workers)
    _fits(first, num_ports, "telemetry.admin_port")
    return [
        Port(
            number=first + offset,
            setting="telemetry.admin_port",
            flag="",
            host=host,
            host_setting="telemetry.admin_host",
        )
        for offset in range(num_ports if first else 0)
    ]


def _fits(first: int, num_ports: int, setting: str) -> None:
    if first and first + num_ports - 1 > _LAST_PORT:
        raise ConfigError(f"{setting}: {num_ports} ports from {first} on go past {_LAST_PORT}")


def check_ports(config: ClusterConfig) -> None:
    """Raises ConfigError that names the port and its setting where one is taken or given twice."""
    asked: dict[int, Port] = {}
    for port in [*public_ports(config), *admin_ports(config)]:
        if port.number and port.number in asked:  # 0: the system will choose
            raise ConfigError(
                f"port {port.number} is given twice: {asked[port.number].setting} and "
                f"{port.setting} must differ"
            )
        asked[port.number] = port
        _try(port)


def _try(port: Port) -> None:
    try:
        found = socket.getaddrinfo(
            port.host, port.number, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise ConfigError(f"{port.host_setting}: no such host: {port.host!r}") from error
    for family, kind, _, _, address in found:
        with socket.socket(family, kind) as probe:
            # As the servers do: a port whose last connections still linger is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:
                raise ConfigError(_refusal(port, error)) from error


def _refusal(port: Port, error: OSError) -> str:
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{port.host_setting}: {port.host} is not an address of this machine"
    taken = error.errno == errno.EADDRINUSE
    why = "is in use" if taken else f"cannot be had ({os.strerror(error.errno or 0)})"
    ways = f"{port.flag} or {port.setting}" if port.flag else port.setting
    return f"port {port.number} on {port.host} {why}: choose another with {ways}"
