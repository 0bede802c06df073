"""How a receiver learns that nothing of a writer can come any more. Real processes and sockets."""

import contextlib
import os
import signal
import socket
import subprocess
import sys

import pytest

from core.messages import WorkerRef
from kv_transfer import liveness

OWNER = WorkerRef(name="decode-l", incarnation="1")
WRITER = WorkerRef(name="prefill-l", incarnation="1")

WRITES_AND_WAITS = """
import socket, sys
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
connection.setblocking(False)
sent = 0
try:
    while True:
        sent += connection.send(bytes(1 << 16))
except BlockingIOError:
    print(sent, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def owned():
    path, file = liveness.create_owned(OWNER)
    yield path
    liveness.unlink_owned(path)
    os.close(file)


def test_a_mark_stands_until_its_last_holder_closes(owned):
    assert liveness.is_gone(owned, WRITER)
    first, second = liveness.Marker(owned, WRITER), liveness.Marker(owned, WRITER)
    first.close()
    first.close()
    assert not liveness.is_gone(owned, WRITER)
    second.close()
    assert liveness.is_gone(owned, WRITER)


def test_a_mark_made_after_one_was_taken_away_is_seen(owned):
    liveness.Marker(owned, WRITER).close()
    assert liveness.is_gone(owned, WRITER)
    again = liveness.Marker(owned, WRITER)
    assert not liveness.is_gone(owned, WRITER)
    assert liveness.is_gone(owned, WorkerRef(name=WRITER.name, incarnation="2"))
    again.close()


def test_unlinking_takes_the_marks_along(owned):
    with contextlib.closing(liveness.Marker(owned, WRITER)):
        liveness.unlink_owned(owned)
        liveness.unlink_owned(owned)
    assert list(owned.parent.glob(f"{owned.name}*")) == []


def test_bytes_of_a_dead_process_are_on_their_way_until_they_are_read(eventually):
    """The kernel sends what a process had written, after its death too."""
    eventually(liveness.streams_are_read)
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, "-c", WRITES_AND_WAITS, str(server.getsockname()[1])]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
            connection, _ = server.accept()
            with connection:
                sent = int(writer.stdout.readline())
                assert liveness.streams_are_read()  # it lives, and its mark says so
                writer.send_signal(signal.SIGKILL)
                writer.wait(timeout=10)
                assert not liveness.streams_are_read()
                while sent:
                    assert not liveness.streams_are_read()
                    got = len(connection.recv(sent))
                    assert got > 0
                    sent -= got
                assert connection.recv(1) == b""
                assert not liveness.streams_are_read()  # read, but not closed here
            assert liveness.streams_are_read()


def test_looking_at_the_connections_leaves_no_file_open():
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        liveness.streams_are_read()
    assert len(os.listdir("/proc/self/fd")) == before


def test_death_is_believed_only_a_moment_after_it_was_first_seen(owned):
    """However many requests look at once: each look of the same moment is still the first."""
    now_s = 100.0
    looks = liveness.SecondLook(owned, clock=lambda: now_s)
    assert [looks.is_gone(WRITER) for _ in range(3)] == [False, False, False]
    now_s += 0.2
    assert looks.is_gone(WRITER)
    looks.forget(WRITER)
    assert not looks.is_gone(WRITER)
