"""One supervised process of a cluster whose others are elsewhere."""

import os
import signal
from dataclasses import replace

import pytest

from core.config import ClusterConfig, NetworkConfig
from core.errors import ConfigError
from deploy.lone import LoneProcess
from deploy.names import process_name
from deploy.roles import Roles

ROLES = replace(Roles(), prepare="fake_prepare", decode="fake_role")


@pytest.fixture
def alone(config: ClusterConfig, monkeypatch: pytest.MonkeyPatch) -> ClusterConfig:
    monkeypatch.setenv("TANDEM_SECRET", "0123456789abcdef")
    return config.model_copy(update={"network": NetworkConfig(schedulers=("127.0.0.1:1",))})


async def test_it_serves_is_restarted_and_leaves_nothing(
    runtime_dir, alone, life, eventually, is_alive
):
    async with LoneProcess("decode", alone, name="decode-a", roles=ROLES) as process:
        await process.ready.wait()
        (run_dir,) = runtime_dir.glob("tandem-*")
        pid, incarnation = life(run_dir, "decode-a")
        os.kill(pid, signal.SIGKILL)
        await eventually(
            lambda: life(run_dir, "decode-a")[1] != incarnation, "it is back", timeout_s=60
        )
        pid, _ = life(run_dir, "decode-a")
    assert not is_alive(pid)
    assert list(runtime_dir.iterdir()) == []


async def test_without_a_scheduler_or_a_secret_it_is_refused(alone, config, monkeypatch):
    with pytest.raises(ConfigError, match=r"network\.schedulers is needed"):
        async with LoneProcess("decode", config, name="decode-a", roles=ROLES):
            pytest.fail("it must not start")
    monkeypatch.delenv("TANDEM_SECRET")
    with pytest.raises(ConfigError, match=r"secret_file is needed, or TANDEM_SECRET"):
        async with LoneProcess("decode", alone, name="decode-a", roles=ROLES):
            pytest.fail("it must not start")


@pytest.mark.parametrize("name", ["", "Decode", "a/b", "-a", "a" * 64])
def test_a_name_that_is_none_is_refused(name: str):
    with pytest.raises(ConfigError, match="a name has 1 to 63"):
        process_name("decode", name)


def test_a_process_without_a_name_is_called_by_its_role_and_machine():
    assert process_name("decode", None).startswith("decode-")
    assert process_name("decode", "tandem-decode-5d8f-x2") == "tandem-decode-5d8f-x2"
