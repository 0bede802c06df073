"""Ports are checked before anything starts."""

import socket

import pytest

from core.config import ClusterConfig, GatewayConfig, SchedulerConfig, TelemetryConfig
from core.errors import ConfigError
from deploy.ports import check_ports


def _config(http: int = 0, grpc: int = 0, admin: int = 0, **gateway: object) -> ClusterConfig:
    return ClusterConfig(
        gateway=GatewayConfig(http_port=http, grpc_port=grpc, **gateway),
        scheduler=SchedulerConfig(admin_port=admin),
    )


@pytest.mark.parametrize("which", ["http", "grpc", "admin"])
def test_a_port_in_use_is_named_with_its_flag(which: str):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} .* in use.*--{which}-port"):
            check_ports(_config(**{which: port}))
    check_ports(_config(**{which: port}))


def test_one_port_for_two_servers_is_refused():
    with pytest.raises(ConfigError, match=r"9000 .*gateway\.grpc_port and scheduler\.admin_port"):
        check_ports(_config(grpc=9000, admin=9000))


def test_ports_that_the_system_chooses_may_be_equal():
    check_ports(_config())


def test_an_unknown_host_is_named_by_its_setting():
    with pytest.raises(ConfigError, match=r"gateway\.host: no such host: 'no\.such\.invalid'"):
        check_ports(_config(host="no.such.invalid", insecure=True))


def test_an_address_of_another_machine_is_named_by_its_setting():
    with pytest.raises(ConfigError, match=r"gateway\.host: 192\.0\.2\.1 is not an address"):
        check_ports(_config(host="192.0.2.1", insecure=True))


def test_an_admin_port_in_use_is_named_and_so_is_one_past_the_last():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = ClusterConfig(telemetry=TelemetryConfig(admin_port=port - 1))
        with pytest.raises(ConfigError, match=rf"port {port} .* in use.*telemetry\.admin_port"):
            check_ports(_config().model_copy(update={"telemetry": config.telemetry}))
    last = _config().model_copy(update={"telemetry": TelemetryConfig(admin_port=65534)})
    with pytest.raises(ConfigError, match=r"telemetry\.admin_port: 3 ports from 65534"):
        check_ports(last)


def test_the_ports_of_further_gateways_are_checked_too():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        two = _config(http=port - 1).model_copy(update={"gateways": 2})
        with pytest.raises(ConfigError, match=rf"port {port} .* in use.*--http-port"):
            check_ports(two)
    with pytest.raises(ConfigError, match=r"gateway\.grpc_port: 2 ports from 65535"):
        check_ports(_config(grpc=65535).model_copy(update={"gateways": 2}))
