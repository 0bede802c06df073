"""Which ports a process takes."""

from pathlib import Path

import pytest

from core.config import ClusterConfig, GatewayConfig, NetworkConfig, TelemetryConfig
from core.ports import admin_port_of, gateway_name, public_ports_of, tell_ports, told_ports

ALONE = NetworkConfig(schedulers=("scheduler:50052",))


@pytest.mark.parametrize(
    ("process", "port"),
    [("gateway", 9000), ("gateway-1", 9001), ("prefill-0", 9002), ("decode-0", 9004)],
)
def test_chosen_admin_ports_follow_one_another(process: str, port: int):
    telemetry = TelemetryConfig(admin_port=9000)
    config = ClusterConfig(gateways=2, prefill_workers=2, telemetry=telemetry)
    assert admin_port_of(config, process) == port
    assert admin_port_of(ClusterConfig(), process) == 0


def test_a_process_that_was_started_alone_takes_the_ports_as_they_are():
    config = ClusterConfig(network=ALONE, telemetry=TelemetryConfig(admin_port=9000))
    assert admin_port_of(config, "decode-7f9c-x2") == 9000
    assert public_ports_of(config, "gateway-7f9c-x2") == {"http": 8000, "grpc": 50051}


def test_each_gateway_has_the_ports_after_those_of_the_one_before():
    config = ClusterConfig(gateways=2, gateway=GatewayConfig(http_port=0))
    assert [gateway_name(number) for number in range(2)] == ["gateway", "gateway-1"]
    assert public_ports_of(config, "gateway-1") == {"http": 0, "grpc": 50052}


def test_what_a_process_told_is_there_for_its_next_life(tmp_path: Path):
    assert told_ports(tmp_path, "gateway") == {}
    tell_ports(tmp_path, "gateway", {"http": 1, "grpc": 2})
    tell_ports(tmp_path, "gateway", {"admin": 3})
    assert told_ports(tmp_path, "gateway") == {"http": 1, "grpc": 2, "admin": 3}
    assert told_ports(tmp_path, "gateway-1") == {}
