"""The harness against a real cluster, and against servers that do what none should."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
# A server of the API in a few lines: it answers "/v1/models", and a request with one token. Told to
# `spin` it burns a core meanwhile; told to `die` it ends in the middle of its third answer.
SERVER = """
import http.server, json, os, sys, threading

class Handler(http.server.BaseHTTPRequestHandler):
    answers = 0

    def do_GET(self):
        body = json.dumps({"data": [{"id": "m"}]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'data: {"choices": [{"text": "a"}]}\\n\\n')
        Handler.answers += 1
        if "die" in sys.argv and Handler.answers == 3:
            os._exit(1)
        self.wfile.write(b"data: [DONE]\\n\\n")

    def log_message(self, *_):
        pass

def spin():
    while True:
        pass

if "spin" in sys.argv:
    threading.Thread(target=spin, daemon=True).start()
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def _serve(folder: Path, name: str, how: str) -> str:
    """What --serve takes for the server above."""
    script = folder / "server.py"
    script.write_text(SERVER)
    return f"{name}={sys.executable} {script} {{port}} {how}"


def _compare(*arguments: str) -> subprocess.CompletedProcess[str]:
    load = ("--workload", "random", "--input-len", "4", "--output-len", "1", "--warmup", "1")
    return _run("bench", *load, "--concurrency", "1", "--rounds", "2", *arguments)


def test_tandem_bench_measures_a_running_cluster(cluster):
    load = ("--input-len", "40", "--output-len", "8", "--requests", "6", "--concurrency", "3")
    done = _run("cli.main", "bench", "--url", cluster.http_url, *load, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["completed"], found["errors"], found["short_answers"]) == (6, {}, 0)
    assert (found["prompt_tokens"], found["output_tokens"]) == (240, 48)
    assert found["cached_tokens"] == 0, "no prompt repeats another"
    assert 0 < found["ttft_ms"]["p50"] < found["e2e_ms"]["p50"]
    assert found["tpot_ms"]["count"] == 6
    assert "TTFT" in done.stderr


def test_tandem_bench_tells_in_one_line_what_it_cannot_send(cluster):
    done = _run("cli.main", "bench", "--url", cluster.http_url, "--input-len", "100000")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "--input-len 100000" in line
    assert "the window has" in line


def test_an_arm_that_spins_when_idle_is_paused_and_both_are_measured(tmp_path):
    arms = ("--serve", _serve(tmp_path, "calm", ""), "--serve", _serve(tmp_path, "busy", "spin"))
    raw = tmp_path / "raw.json"
    done = _compare(*arms, "--requests", "4", "--raw", str(raw))
    assert done.returncode == 0, done.stderr
    assert "busy: up" in done.stderr
    assert done.stderr.count("paused between its turns") == 1
    found = json.loads(done.stdout.splitlines()[-1])
    (case,) = found["cases"].values()
    assert found["baseline"] == "busy"
    assert len(case["ratios"]["calm"]["output_tokens_per_s"]["rounds"]) == 2
    assert case["arms"]["calm"]["median"]["pss_mib"] > 1
    turns = json.loads(raw.read_text())["records"]
    assert [turn["arm"] for turn in turns] == ["calm", "busy", "busy", "calm"]
    assert {len(turn["requests"]) for turn in turns} == {4}


def test_an_arm_that_dies_is_reported_and_the_run_ends(tmp_path):
    done = _compare("--serve", _serve(tmp_path, "dies", "die"), "--requests", "4")
    assert done.returncode == 0, done.stderr
    (case,) = json.loads(done.stdout.splitlines()[-1])["cases"].values()
    # A warm-up and one answer, then the death, then nobody for the rest of both rounds.
    errors = case["arms"]["dies"]["errors"]
    assert errors.pop("broken_off") == 1
    # A connection that was made while it died is lost; the others are refused.
    assert sum(errors.values()) == 6
    assert set(errors) <= {"connection_refused", "connection_lost"}
    assert case["arms"]["dies"]["rounds"][0]["completed"] == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--arm", "x=http://127.0.0.1:9"), "no server at http://127.0.0.1:9"),
        (("--serve", "x=exit 3 # {port}"), "x ended with exit code 3 before it served"),
        ((), "no arm: --tandem, --serve or --arm names one"),
    ],
)
def test_an_arm_that_is_not_there_is_one_line_and_exit_code_2(arguments, said):
    done = _compare(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert said in done.stderr.splitlines()[-1]
