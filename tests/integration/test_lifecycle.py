"""A cluster stops when it is told to, heals when a part dies, and leaves nothing behind."""

import os
import signal
import time
from collections.abc import Iterator

import httpx
import pytest

QUESTION = "What is the capital of France?"
CHILDREN = ("scheduler", "prefill-0", "decode-0", "gateway")


@pytest.fixture(scope="module")
def mortal(start_cluster) -> Iterator:
    """A cluster whose processes are killed one after another."""
    cluster = start_cluster()
    yield cluster
    cluster.close()


def _gone(pid: int) -> bool:
    """Whether a process has ended; a zombie that nobody has waited for has, too."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def _nothing_is_left(cluster) -> bool:
    processes = all(map(_gone, cluster.pids().values()))
    return processes and not list(cluster.runtime_dir.iterdir()) and not cluster.segments()


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM]
)
def test_a_stop_lets_a_running_request_finish_and_leaves_nothing(start_cluster, number):
    cluster = start_cluster(settings={"drain_timeout_s": 90.0})
    body = {
        "model": "smollm2-135m-instruct",
        "messages": [{"role": "user", "content": "Tell me about rivers."}],
        "temperature": 0,
        "max_tokens": 48,
        "stream": True,
    }
    url = f"{cluster.http_url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=60, trust_env=False) as response:
        lines = (line for line in response.iter_lines() if line)
        next(lines)
        assert cluster.segments(), "the test looks where segments are"
        cluster.process.send_signal(number)
        assert list(lines)[-1] == "data: [DONE]"
    assert cluster.process.wait(timeout=120) == 0
    assert _nothing_is_left(cluster)


@pytest.mark.parametrize("name", CHILDREN)
def test_a_killed_process_is_replaced_and_requests_are_answered_again(mortal, eventually, name):
    url, pid = mortal.http_url, mortal.pids()[name]
    (incarnation,) = [one for child, one, life in mortal.lives() if (child, life) == (name, pid)]
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: mortal.has_replaced(name, pid), f"{name} is back", timeout_s=60)

    def answers() -> bool:
        try:
            return "Paris" in mortal.ask(QUESTION)
        except httpx.HTTPError:
            return False

    eventually(answers, "requests are answered again", timeout_s=60)
    assert mortal.http_url == url, "a restarted gateway takes its port again"
    assert mortal.pids()[name] != pid
    assert f'"{name}"' in mortal.stderr and "ended unexpectedly" in mortal.stderr
    left = [segment for segment in mortal.segments() if segment.startswith(f"tandem-{name}-")]
    assert not [segment for segment in left if incarnation in segment]
    assert not list(mortal.run_dir.glob(f"*{incarnation}*"))


def test_after_a_killed_launcher_everything_disappears(mortal, eventually):
    mortal.process.kill()
    mortal.process.wait(timeout=10)
    eventually(lambda: _nothing_is_left(mortal), "nothing is left", timeout_s=30)


def test_a_second_ctrl_c_does_not_wait_for_the_drain(start_cluster, eventually):
    cluster = start_cluster(settings={"drain_timeout_s": 120.0})
    body = {
        "model": "smollm2-135m-instruct",
        "prompt": "Rivers",
        "temperature": 0,
        "max_tokens": 4000,
        "ignore_eos": True,
        "stream": True,
    }
    url = f"{cluster.http_url}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=60, trust_env=False) as response:
        assert response.status_code == 200
        next(line for line in response.iter_lines() if line)
        cluster.process.send_signal(signal.SIGINT)
        eventually(lambda: "again: at once" in cluster.stderr, "it heard", timeout_s=30)
        began = time.monotonic()
        assert cluster.stop(signal.SIGINT) == 0
        assert time.monotonic() - began < 20, "the answer takes longer, and may"
    assert _nothing_is_left(cluster)


def test_a_port_in_use_is_one_line_before_anything_starts(cluster, start_cluster):
    port = cluster.http_url.rpartition(":")[2]
    second = start_cluster("--http-port", port, ready=False)
    assert second.process.wait(timeout=30) == 78
    assert second.stdout == ""
    assert second.stderr == (
        f"tandem: port {port} on 127.0.0.1 is in use: "
        "choose another with --http-port or gateway.http_port\n"
    )


def test_a_model_file_that_is_damaged_is_one_line(start_cluster, tmp_path):
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF" + b"\x03\0\0\0" + b"\xff" * 64)
    cluster = start_cluster("--model", str(damaged), ready=False)
    assert cluster.process.wait(timeout=60) == 78
    assert cluster.stdout == ""
    assert len(cluster.stderr.splitlines()) == 1, cluster.stderr
    assert "damaged.gguf" in cluster.stderr
