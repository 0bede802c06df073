"""A run directory belongs to one launcher, and nobody else's folder is touched."""

import os
import time
from pathlib import Path

import pytest

from core.config import ClusterConfig
from core.errors import ConfigError, Unavailable
from core.run_dir import join, launcher_is_gone
from deploy.run_dir import RunDir, reap_abandoned


@pytest.fixture
def run_dir(runtime_dir: Path, tmp_path: Path):
    made = RunDir.create(ClusterConfig(), [tmp_path])
    yield made
    made.close()


def _abandon(run_dir: RunDir) -> None:
    """What the kernel does at the launcher's death."""
    os.close(run_dir._claim_fd)
    run_dir._claim_fd = -1


def test_a_claimed_directory_is_not_reaped(run_dir: RunDir):
    assert reap_abandoned() == []
    assert run_dir.path.exists()


def test_an_abandoned_directory_is_reaped(run_dir: RunDir):
    _abandon(run_dir)
    assert launcher_is_gone(run_dir.path)
    assert reap_abandoned() == [run_dir.path.name]
    assert not run_dir.path.exists()


def test_an_abandoned_directory_is_left_to_the_processes_that_still_use_it(run_dir: RunDir):
    membership = join(run_dir.path)
    _abandon(run_dir)
    assert reap_abandoned() == []
    os.close(membership)
    assert reap_abandoned() == [run_dir.path.name]


def test_a_process_id_that_is_used_again_does_not_look_like_the_launcher(run_dir: RunDir):
    _abandon(run_dir)
    (run_dir.path / "launcher.pid").write_text(str(os.getpid()))
    assert launcher_is_gone(run_dir.path)


def test_a_folder_that_only_has_such_a_name_is_left_alone(runtime_dir: Path):
    notes = runtime_dir / "tandem-notes" / "thoughts.txt"
    notes.parent.mkdir()
    notes.write_text("mine")
    hidden = runtime_dir / ".tandem-notes" / "thoughts.txt"
    hidden.parent.mkdir()
    hidden.write_text("mine")
    os.utime(hidden.parent, (0, 0))
    assert reap_abandoned() == []
    assert notes.exists() and hidden.exists()


def test_a_directory_whose_making_was_cut_short_is_reaped_when_it_is_old(runtime_dir: Path):
    half_made = runtime_dir / ".tandem-abcdefgh"
    half_made.mkdir()
    (half_made / "launcher.pid").touch()
    assert reap_abandoned() == [], "it may be in the making"
    an_hour_ago = time.time() - 3600
    os.utime(half_made, (an_hour_ago, an_hour_ago))
    assert reap_abandoned() == [half_made.name]


def test_a_process_that_says_no_ports_is_named(run_dir: RunDir):
    with pytest.raises(Unavailable, match="gateway does not say where it listens"):
        run_dir.bound("gateway")


def test_a_path_too_long_for_sockets_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    deep = tmp_path / ("x" * 80)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(ConfigError, match="no folder for Unix sockets"):
        RunDir.create(ClusterConfig(), [tmp_path])
