"""The one-host cluster of containers: its file is one, and its settings are ones."""

import subprocess
from typing import Any

import pytest
import yaml

from cli.settings import cluster_config
from tests.deploy.conftest import ROOT

COMPOSE = ROOT / "deploy" / "compose.yaml"
ROLES = {
    "gateway-0": "gateway",
    "gateway-1": "gateway",
    "scheduler": "scheduler",
    "prefill-0": "prefill",
    "decode-0": "decode",
}


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())["services"]
    return found


@pytest.mark.parametrize(("service", "role"), ROLES.items())
def test_each_process_is_given_settings_that_it_takes(services, service: str, role: str):
    assert services[service]["command"][:2] == ["run", role]
    config = cluster_config(None, {}, services[service]["environment"])
    assert config.network.schedulers == ("scheduler:50052",)
    assert config.telemetry.admin_port == 9100
    assert config.gateway.host == "0.0.0.0"


def test_a_container_has_the_time_to_drain_and_writes_no_image(services):
    for name in ROLES:
        config = cluster_config(None, {}, services[name]["environment"])
        assert int(services[name]["stop_grace_period"].removesuffix("s")) > config.stop_s + 7
        assert services[name]["read_only"] is True
        assert services[name]["cap_drop"] == ["ALL"]


def test_nothing_is_published_beyond_this_host(services):
    ports = [port for each in services.values() for port in each.get("ports", ())]
    assert ports and all(port.startswith("127.0.0.1:") for port in ports)


@pytest.mark.deploy
def test_the_file_is_one_of_the_compose_specification(program):
    command = [str(program("check-jsonschema")), "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*command, str(COMPOSE)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
