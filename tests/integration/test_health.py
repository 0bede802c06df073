"""Frozen is not alive, and busy is not dead: the probes of real processes."""

import os
import signal
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.faults

_PROBE_S = 1.0
_DEADLINE_S = 60.0


def _targets(cluster: Any) -> dict[str, str]:
    """Each process's admin server by its name, as the scheduler tells it."""
    found = httpx.get(f"{cluster.admin_url}/sd", timeout=5, trust_env=False).json()
    return {each["labels"]["process"]: f"http://{each['targets'][0]}" for each in found}


def _probe(url: str, path: str) -> int | None:
    """The status; None where nothing comes within a probe's time."""
    try:
        return httpx.get(f"{url}{path}", timeout=_PROBE_S, trust_env=False).status_code
    except httpx.HTTPError:
        return None


def test_a_frozen_worker_is_not_alive_and_the_others_are(start_cluster, eventually):
    cluster = start_cluster(settings={"frozen_after_s": 8.0})
    before = _targets(cluster)
    assert set(before) == {"gateway", "scheduler", "prefill-0", "decode-0"}
    for url in before.values():
        eventually(lambda url=url: _probe(url, "/livez") == 200, "alive", timeout_s=_DEADLINE_S)
        eventually(lambda url=url: _probe(url, "/readyz") == 200, "ready", timeout_s=_DEADLINE_S)
    pid = cluster.pids()["decode-0"]
    os.kill(pid, signal.SIGSTOP)
    assert _probe(before["decode-0"], "/livez") is None
    for name in ("gateway", "scheduler", "prefill-0"):
        eventually(
            lambda name=name: _probe(before[name], "/livez") == 200,
            f"{name} is alive",
            timeout_s=_DEADLINE_S,
        )
    # Without its decode worker nobody can be served: both say so, and go on living.
    for name in ("scheduler", "gateway"):
        eventually(
            lambda name=name: _probe(before[name], "/readyz") == 503,
            f"{name} is not ready",
            timeout_s=_DEADLINE_S,
        )
    eventually(
        lambda: cluster.has_replaced("decode-0", pid),
        "the launcher has replaced it",
        timeout_s=_DEADLINE_S,
    )
    eventually(
        lambda: _probe(_targets(cluster).get("decode-0", "http://127.0.0.1:1"), "/readyz") == 200,
        "its next life is told to Prometheus, and ready",
        timeout_s=_DEADLINE_S,
    )
    eventually(
        lambda: _probe(before["gateway"], "/readyz") == 200, "ready again", timeout_s=_DEADLINE_S
    )
