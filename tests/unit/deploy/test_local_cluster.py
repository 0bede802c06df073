"""The launcher's promises, over processes that do nothing but live and die."""

import asyncio
import os
import signal
import socket
from pathlib import Path

import pytest

import deploy
from core.config import ClusterConfig, GatewayConfig
from core.errors import ConfigError, Unavailable
from deploy.child import ChildRefused
from deploy.environment import command
from deploy.local import LocalCluster

NAMES = ("scheduler", "prefill-0", "decode-0", "gateway")


async def test_inside_the_block_every_process_serves_and_after_it_nothing_is_left(
    fake_cluster, runtime_dir, life, is_alive
):
    async with fake_cluster() as cluster:
        run_dir = cluster.run_dir.path
        assert run_dir.parent == runtime_dir
        assert run_dir.stat().st_mode & 0o777 == 0o700
        pids = [life(run_dir, name)[0] for name in NAMES]
        assert len(set(pids)) == 4 and all(map(is_alive, pids))
        assert cluster.http_urls == ["http://127.0.0.1:40001"]
        assert cluster.grpc_targets == ["127.0.0.1:40002"]
        assert cluster.admin_url == "http://127.0.0.1:40003"
        assert [model.name for model in cluster.models] == ["fake"]
    assert not any(map(is_alive, pids))
    assert list(runtime_dir.iterdir()) == []


async def test_a_cluster_without_prefill_workers_comes_up(fake_cluster, life, is_alive):
    async with fake_cluster(prefill_workers=0) as cluster:
        names = {path.stem for path in cluster.run_dir.path.glob("*.pid")}
        assert names - {"launcher"} == {"scheduler", "decode-0", "gateway"}
        assert is_alive(life(cluster.run_dir.path, "decode-0")[0])
        assert cluster.num_workers == (0, 1)


@pytest.mark.parametrize("name", NAMES)
async def test_a_killed_process_comes_back_with_a_new_incarnation(
    fake_cluster, life, eventually, name
):
    async with fake_cluster() as cluster:
        run_dir = cluster.run_dir.path
        pid, incarnation = life(run_dir, name)
        os.kill(pid, signal.SIGKILL)
        await eventually(
            lambda: (
                life(run_dir, name)[1] != incarnation
                and (run_dir / f"{name}-{life(run_dir, name)[1]}.ready").exists()
            ),
            f"{name} is back",
        )
        left = [path.name for path in run_dir.glob(f"*{incarnation}*")]
        assert left == [], "the dead life's files are gone"


async def test_each_gateway_is_a_process_of_its_own(fake_cluster, life, is_alive):
    async with fake_cluster(gateways=2) as cluster:
        run_dir = cluster.run_dir.path
        pids = {life(run_dir, name)[0] for name in ("gateway", "gateway-1")}
        assert len(pids) == 2 and all(map(is_alive, pids))
        assert cluster.http_urls == ["http://127.0.0.1:40001", "http://127.0.0.1:40011"]
        assert cluster.grpc_targets == ["127.0.0.1:40002", "127.0.0.1:40012"]
    assert not any(map(is_alive, pids))


async def test_a_process_that_refuses_its_configuration_ends_the_start(
    fake_cluster, runtime_dir, capfd
):
    with pytest.raises(ChildRefused):
        async with fake_cluster(decode="fake_refusing"):
            pytest.fail("it must not come up")
    said = capfd.readouterr().err
    assert "decode-0: the tokenizer is missing" in said
    assert "Traceback" not in said
    assert list(runtime_dir.iterdir()) == []


async def test_a_process_that_never_serves_ends_the_start(fake_cluster, runtime_dir):
    with pytest.raises(Unavailable, match=r"prefill-0 .* exit code 3"):
        async with fake_cluster(prefill="fake_crashing"):
            pytest.fail("it must not come up")
    assert list(runtime_dir.iterdir()) == []


async def test_a_model_that_is_missing_is_one_line_before_anything_starts(
    runtime_dir, fake_cluster, model_dir
):
    model_dir.rmdir()
    with pytest.raises(ConfigError) as caught:
        async with fake_cluster():
            pytest.fail("it must not come up")
    assert caught.value.message == f"no such model: {model_dir}"
    assert list(runtime_dir.iterdir()) == []


async def test_a_process_that_does_not_stop_is_killed(fake_cluster, runtime_dir, monkeypatch):
    monkeypatch.setattr("deploy.local._KILL_AFTER_S", 0.1)
    async with fake_cluster(decode="fake_deaf"):
        pass
    assert list(runtime_dir.iterdir()) == []


async def test_kill_does_not_wait_for_the_drain(fake_cluster, runtime_dir):
    loop = asyncio.get_running_loop()
    async with fake_cluster(gateway="fake_role", decode="fake_deaf") as cluster:
        began = loop.time()
        cluster.kill()
    assert loop.time() - began < 1.0, "the drain alone would take 1 s"
    assert list(runtime_dir.iterdir()) == []


async def test_cancelling_the_start_leaves_nothing(fake_cluster, runtime_dir, eventually):
    async def enter() -> None:
        async with fake_cluster(gateway="fake_crashing"):
            pass

    task = asyncio.create_task(enter())
    await eventually(lambda: any(runtime_dir.glob("tandem-*/*.pid")), "a process runs")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert list(runtime_dir.iterdir()) == []


@pytest.fixture
async def launcher(runtime_dir, model_dir):
    """A launcher in a process of its own, and its run directory."""
    root = str(Path(deploy.__file__).parent.parent)
    process = await asyncio.create_subprocess_exec(
        *command("fake_launcher", str(model_dir)),
        env={**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ["PYTHONPATH"]])},
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), 30)
    yield process, Path(line.decode().strip())
    if process.returncode is None:
        process.kill()
        await process.wait()


async def test_after_a_killed_launcher_everything_disappears(launcher, life, is_alive, eventually):
    process, run_dir = launcher
    pids = [life(run_dir, name)[0] for name in NAMES]
    process.kill()
    await process.wait()
    await eventually(lambda: not any(map(is_alive, pids)), "the processes end by themselves")
    await eventually(lambda: not run_dir.exists(), "the last one removes the run directory")


async def test_what_a_killed_cluster_left_is_reaped_at_the_next_start(
    launcher, runtime_dir, life, is_alive, eventually, fake_cluster
):
    process, run_dir = launcher
    pids = [life(run_dir, name)[0] for name in NAMES]
    process.send_signal(signal.SIGSTOP)  # so that it restarts nobody
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    await eventually(lambda: not any(map(is_alive, pids)), "they are dead")
    process.kill()
    await process.wait()
    assert run_dir.exists()
    async with fake_cluster() as cluster:
        assert list(runtime_dir.iterdir()) == [cluster.run_dir.path]


async def test_a_living_cluster_is_not_reaped_by_another(fake_cluster):
    async with fake_cluster() as first, fake_cluster() as second:
        assert first.run_dir.path.exists()
        assert second.run_dir.path != first.run_dir.path


async def test_a_port_in_use_is_one_line_that_names_it(config: ClusterConfig, runtime_dir):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        busy = config.model_copy(update={"gateway": GatewayConfig(http_port=port, grpc_port=0)})
        with pytest.raises(ConfigError) as caught:
            await LocalCluster(busy).__aenter__()
    assert caught.value.message == (
        f"port {port} on 127.0.0.1 is in use: choose another with --http-port or gateway.http_port"
    )
