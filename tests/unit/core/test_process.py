"""A process of the cluster comes, goes, and takes its files with it."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.config import ClusterConfig
from core.messages import WorkerRef
from core.model_card import ModelCard
from core.process import EXIT_STUCK, arguments, ready_file, remove_files
from core.run_dir import claim

ME = WorkerRef(name="scheduler", incarnation="12ab")
ROOT = Path(__file__).resolve().parents[3]

SERVE = """
import asyncio
from core.process import run
from core.telemetry.names import Role
async def main(context, stop):
    context.mark_ready()
    print("ready", flush=True)
    await {wait}
run(main, Role.GATEWAY)
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    """A run directory that the test itself has claimed."""
    folder = tmp_path / "run"
    folder.mkdir()
    ModelCard(
        folder=str(tmp_path),
        source="",
        name="m",
        revision="1",
        architecture="llama",
        vocab_size=1,
        context_window=1,
        eos_token_ids=(),
        bos_token="",
        eos_token="",
    ).store()
    (folder / "card").symlink_to(tmp_path)
    ClusterConfig(drain_timeout_s=0.0).store(folder)
    fd = claim(folder)
    yield folder
    os.close(fd)


def _start(run_dir: Path, program: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments(run_dir, ME)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_asks_it_to_stop_and_it_removes_its_files(run_dir: Path, number: signal.Signals):
    process = _start(run_dir, SERVE.format(wait="stop.wait()"))
    with process:
        assert process.stdout and process.stdout.readline() == "ready\n"
        assert ready_file(run_dir, ME).exists()
        process.send_signal(number)
        assert process.wait(timeout=20) == 0
    assert not ready_file(run_dir, ME).exists()
    assert run_dir.exists(), "the launcher lives"


def test_one_that_does_not_stop_in_time_ends_itself(run_dir: Path):
    quick = SERVE.replace("run(main,", "import core.process as p; p.STOP_GRACE_S = 0.1; run(main,")
    process = _start(run_dir, quick.format(wait="asyncio.Event().wait()"))
    with process:
        assert process.stdout and process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.wait(timeout=20) == EXIT_STUCK
        assert process.stderr and "did not stop in time" in process.stderr.read()
    assert not ready_file(run_dir, ME).exists()


def test_one_whose_run_directory_is_gone_says_so_in_a_line(tmp_path: Path):
    done = _start(tmp_path / "none", SERVE.format(wait="stop.wait()"))
    _, said = done.communicate(timeout=20)
    assert done.returncode == 1
    assert said == f"scheduler: {tmp_path}/none is gone, and the launcher with it\n"


def test_the_files_of_a_dead_life_go_and_those_of_others_stay(tmp_path: Path):
    dead = ["scheduler-12ab.sock", "scheduler-12ab.ready", "scheduler.sock"]
    others = ["scheduler-99ff.ready", "decode-0-12ab.sock"]
    for name in dead + others:
        (tmp_path / name).touch()
    remove_files(tmp_path, ME)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)
