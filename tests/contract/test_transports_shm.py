"""What shm promises beyond the contract: whose a segment is, and that none is left."""

import secrets
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from core.errors import ConfigError, Unavailable
from core.messages import WorkerRef
from kv_transfer import liveness, shm


@pytest.fixture
def pair(make_pair):
    return make_pair("shm")


def test_a_segment_is_its_users_alone(pair):
    assert stat.S_IMODE(pair.segment.path.stat().st_mode) == 0o600


def test_a_segment_of_another_owner_is_refused(pair):
    stranger = WorkerRef(name=pair.me.name, incarnation="earlier")
    with pytest.raises(Unavailable, match="belongs to"):
        shm.ShmSender(pair.receiver.offer(pair.writer), pair.writer, stranger)
    assert pair.receiver.is_dead(pair.writer)  # it left no mark


@pytest.mark.parametrize("content", [b"", b"short", bytes(8192), secrets.token_bytes(8192)])
def test_what_is_no_segment_is_refused(tmp_path, content):
    path = tmp_path / "tandem-x.kv"
    path.write_bytes(content)
    with pytest.raises(Unavailable):
        shm.Segment.attach(path)


def test_a_closed_sender_writes_nothing(pair):
    sender = shm.ShmSender(pair.receiver.offer(pair.writer), pair.writer, pair.me)
    sender.close()
    with pytest.raises(Unavailable):
        sender.write(None, 0, 0, 0, pair.data(1))
    assert not pair.pool.any()


@pytest.mark.parametrize(("target", "offset"), [(-1, 0), (8, 0), (0, 1), (0, -1)])
def test_what_does_not_fit_a_block_is_written_nowhere(pair, target, offset):
    sender = shm.ShmSender(pair.receiver.offer(pair.writer), pair.writer, pair.me)
    with pytest.raises(Unavailable, match="is not in the KV segment"):
        sender.write(None, 0, target, offset, pair.data(1))
    assert not pair.pool.any()
    sender.close()


def test_a_segment_of_a_dead_owner_is_reaped_and_of_a_living_one_is_not(pair):
    program = (
        "import os; from core.messages import WorkerRef; from kv_transfer.shm import Segment\n"
        "s = Segment.create(WorkerRef(name='decode-z', incarnation='%s'), 2, 100)\n"
        "print(s.path.name, flush=True); os._exit(1)"
    )
    left = subprocess.run(
        [sys.executable, "-c", program % secrets.token_hex(4)],
        capture_output=True,
        text=True,
        cwd=Path(shm.__file__).parents[1],
    ).stdout.strip()
    assert (liveness.shared_folder() / left).exists()
    reaped = shm.reap_orphans()
    assert left in reaped
    assert not (liveness.shared_folder() / left).exists()
    assert pair.segment.path.exists()


def test_the_segments_of_one_worker_alone_are_unlinked(pair):
    other = shm.Segment.create(WorkerRef(name="decode-y", incarnation="ab12"), 1, 10)
    assert shm.unlink_segments(WorkerRef(name="decode-y", incarnation="ab12")) == [other.path.name]
    assert pair.segment.path.exists()
    other.close()


def test_free_memory_is_not_promised_twice(pair, monkeypatch):
    """A segment takes its pages as it is used: what it may still take is not free."""
    first = shm.Segment.create(WorkerRef(name="decode-x", incarnation="1"), 2, 1_000_000)
    try:
        folder = first.path.parent
        promised = shm._promised_bytes(folder)
        assert promised >= 1_900_000
        usage = shutil.disk_usage(folder)._replace(free=promised + 100)
        monkeypatch.setattr(shm.shutil, "disk_usage", lambda _: usage)
        with pytest.raises(ConfigError, match=r"which has \d+: lower engine.decode_kv_bytes"):
            shm.Segment.create(WorkerRef(name="decode-y", incarnation="1"), 2, 1_000_000)
    finally:
        first.unlink()
        first.close()
