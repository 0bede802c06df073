"""The surroundings of a child process."""

import os
from pathlib import Path

import pytest

import deploy
from core.config import ClusterConfig, EngineConfig
from deploy import environment


def test_workers_share_the_cores(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(environment, "available_cores", lambda: 8)
    env = environment.worker(ClusterConfig(prefill_workers=1, decode_workers=2))
    assert env["OMP_NUM_THREADS"] == env["MKL_NUM_THREADS"] == env["OPENBLAS_NUM_THREADS"] == "2"


def test_without_prefill_workers_the_decode_workers_have_all_cores(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(environment, "available_cores", lambda: 8)
    env = environment.worker(ClusterConfig(prefill_workers=0, decode_workers=1))
    assert env["OMP_NUM_THREADS"] == "8"


def test_a_worker_has_a_thread_where_there_are_more_workers_than_cores(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(environment, "available_cores", lambda: 2)
    env = environment.worker(ClusterConfig(prefill_workers=4, decode_workers=4))
    assert env["OMP_NUM_THREADS"] == "1"


def test_configured_threads_win():
    env = environment.worker(ClusterConfig(engine=EngineConfig(threads=3)))
    assert env["OMP_NUM_THREADS"] == "3"


def test_our_packages_come_before_others_of_the_same_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    root = str(Path(deploy.__file__).resolve().parent.parent)
    assert environment.light()["PYTHONPATH"] == f"{root}{os.pathsep}elsewhere"


@pytest.mark.parametrize(
    ("limit", "cores"), [("150000 100000", 1), ("max 100000", 8), ("", 8), ("50000 100000", 1)]
)
def test_a_containers_quota_bounds_the_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: str, cores: int
):
    (tmp_path / "cpu.max").write_text(limit)
    monkeypatch.setattr(environment, "_CGROUP_CPU_LIMIT", tmp_path / "cpu.max")
    monkeypatch.setattr(environment.os, "sched_getaffinity", lambda _: range(8), raising=False)
    monkeypatch.setattr(environment.os, "cpu_count", lambda: 8)
    assert environment.available_cores() == cores
