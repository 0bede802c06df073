"""Each role by a command of its own, as in containers: they meet over TCP and serve together."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from core.config import DEFAULT_MODEL
from tests.integration.separate import ROLES, SeparateProcesses, answers

# Two clusters begin, each model of which is loaded by two workers: on a busy machine, minutes.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The gateway's and the scheduler's admin URL of four processes that were started alone."""
    with SeparateProcesses(tmp_path_factory.mktemp("roles")) as processes:
        for role in ROLES:
            processes.start(role, f"{role}-a")
        yield processes.gateway_url, processes.admin_url


def test_four_commands_are_one_cluster_that_hands_kv_over_by_tcp(urls, eventually, cluster):
    gateway, admin = urls
    eventually(lambda: answers(f"{gateway}/readyz"), "the gateway is ready", timeout_s=300)
    question = {"role": "user", "content": "What is the capital of France?"}
    body = {"model": DEFAULT_MODEL, "messages": [question], "temperature": 0, "max_tokens": 12}
    asked = httpx.post(
        f"{gateway}/v1/chat/completions", json=body, timeout=120, trust_env=False
    ).raise_for_status()
    text = asked.json()["choices"][0]["message"]["content"]
    assert text == cluster.ask("What is the capital of France?", max_tokens=12)
    workers = httpx.get(f"{admin}/cluster", timeout=30, trust_env=False).json()["workers"]
    assert {each["worker"].partition("/")[0] for each in workers} == {"prefill-a", "decode-a"}
    targets = httpx.get(f"{admin}/sd", timeout=30, trust_env=False).json()
    found = {each["labels"]["process"]: each["targets"][0] for each in targets}
    assert set(found) == {"scheduler-a", "gateway-a", "prefill-a", "decode-a"}
    metrics = httpx.get(f"http://{found['decode-a']}/metrics", timeout=30, trust_env=False).text
    assert "tandem_adoptions_total{" in metrics or "tandem_adoptions_total 1.0" in metrics


def test_a_role_without_what_it_needs_is_refused_in_one_line(tmp_path: Path):
    ended = subprocess.run(
        [sys.executable, "-m", "cli.main", "run", "decode"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 78
    assert ended.stderr.splitlines()[-1].endswith(
        "network.schedulers is needed: host:port where the scheduler listens"
    )
    assert "Traceback" not in ended.stderr
