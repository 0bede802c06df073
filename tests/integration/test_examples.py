"""The examples that the README points to do what it says, unchanged."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _run(cluster, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={
            **os.environ,
            "TANDEM_URL": cluster.http_url,
            "TANDEM_GRPC": cluster.grpc_target,
            "NO_PROXY": "127.0.0.1",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("example", ["examples/openai_chat.py", "examples/grpc_chat.py"])
def test_an_example_streams_an_answer(cluster, example: str):
    done = _run(cluster, example)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert done.stdout.rstrip().endswith("]"), "the usage follows the answer"


def test_the_grpc_example_is_short():
    assert len((ROOT / "examples" / "grpc_chat.py").read_text().splitlines()) <= 40


def test_tandem_chat_streams_an_answer(cluster):
    chat = ("-m", "cli.main", "chat", "--url", cluster.http_url, "--temperature", "0")
    done = _run(cluster, *chat, "What is the capital of France?")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_tandem_chat_tells_a_refusal_in_one_line(cluster):
    done = _run(cluster, "-m", "cli.main", "chat", "--url", cluster.http_url, "--top-p", "7", "Hi")
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "top_p" in done.stderr


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_line_that_serve_prints_answers_when_it_is_pasted(cluster):
    line = next(line for line in cluster.stdout.splitlines() if line.strip().startswith("curl"))
    done = subprocess.run(
        ["sh", "-c", f"{line} --silent --noproxy '*'"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
