"""A cluster of fakes: the launcher is real, the processes do nothing but live and die."""

import asyncio
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from core.config import ClusterConfig, GatewayConfig, SchedulerConfig
from deploy.local import LocalCluster
from deploy.roles import Roles

FAKES = Path(__file__).parent / "fakes"
_ALL_FAKE = Roles(
    prepare="fake_prepare",
    scheduler="fake_role",
    prefill="fake_role",
    decode="fake_role",
    gateway="fake_role",
)


@pytest.fixture
def runtime_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where run directories are made. Short: a Unix socket's path is."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        monkeypatch.setenv("PYTHONPATH", str(FAKES))
        yield Path(folder)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """What the fake `prepare` takes for a model."""
    folder = tmp_path / "model"
    folder.mkdir()
    return folder


@pytest.fixture
def config(model_dir: Path) -> ClusterConfig:
    return ClusterConfig(
        model=str(model_dir),
        drain_timeout_s=1.0,
        gateway=GatewayConfig(http_port=0, grpc_port=0),
        scheduler=SchedulerConfig(admin_port=0),
    )


@pytest.fixture
def fake_cluster(runtime_dir: Path, config: ClusterConfig) -> Callable[..., LocalCluster]:
    """Builds a cluster of fakes; keywords replace a role's module."""

    def build(*, prefill_workers: int = 1, gateways: int = 1, **modules: str) -> LocalCluster:
        sizes = {"prefill_workers": prefill_workers, "gateways": gateways}
        sized = config.model_copy(update=sizes)
        return LocalCluster(sized, roles=replace(_ALL_FAKE, **modules))

    return build


@pytest.fixture
def life() -> Callable[[Path, str], tuple[int, str]]:
    """The pid and the incarnation of a fake's present life."""

    def read(run_dir: Path, name: str) -> tuple[int, str]:
        pid, incarnation = (run_dir / f"{name}.pid").read_text().split()
        return int(pid), incarnation

    return read


@pytest.fixture
def eventually() -> Callable[..., object]:
    """Waits for something that no event tells of, with a deadline."""

    async def wait(condition: Callable[[], bool], what: str, timeout_s: float = 10.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert condition(), what

    return wait


@pytest.fixture
def is_alive() -> Callable[[int], bool]:
    """Whether a process runs; a zombie does not."""

    def check(pid: int) -> bool:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return Path("/proc").is_dir() is False and _signals(pid)
        return state != "Z"

    return check


def _signals(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
