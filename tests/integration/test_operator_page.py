"""What operators see of a real cluster: its page in a real browser, `tandem top`, `tandem trace`.

The browser is Chromium without a window (`apt-get install chromium`). What the page has drawn is
read from its document, and whatever it complained of from its log.
"""

import re
import shutil
import subprocess
import sys
from typing import Any

import httpx
import pytest

from cli.operator_client import OperatorClient
from cli.top_screen import TopApp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
LABEL = "<img src=x onerror=alert(1)>"
WORD = "xylophone"


@pytest.fixture(scope="module")
def gateway_admin(cluster) -> str:
    """Where the gateway's page is."""
    found = httpx.get(f"{cluster.admin_url}/sd", timeout=5, trust_env=False).json()
    (target,) = [each for each in found if each["labels"]["role"] == "gateway"]
    return f"http://{target['targets'][0]}"


@pytest.fixture(scope="module")
def asked(cluster, gateway_admin) -> dict[str, Any]:
    """A request that was answered, as the gateway remembers it."""
    answer = httpx.post(
        f"{cluster.http_url}/v1/completions",
        json={"model": "smollm2-135m-instruct", "prompt": f"A {WORD} is", "max_tokens": 8},
        headers={"x-request-id": LABEL},
        timeout=60,
        trust_env=False,
    )
    assert answer.status_code == 200
    job = answer.json()["id"]
    told = httpx.get(f"{gateway_admin}/requests/{job}", timeout=5, trust_env=False)
    assert WORD not in told.text
    (request,) = told.json()["requests"]
    return request


def test_a_request_is_remembered_with_its_way_through_the_processes(asked):
    assert (asked["outcome"], asked["request_id"]) == ("answered", LABEL)
    where = {stage["name"]: stage["process"] for stage in asked["stages"]}
    assert {
        "validate": "gateway",
        "queue": "scheduler",
        "decode": "decode-0",
    }.items() <= where.items()
    for stage in asked["stages"]:
        assert 0 <= stage["start_s"] <= stage["end_s"] <= asked["duration_s"]


def test_trace_prints_its_waterfall(cluster, asked):
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "cli.main", "trace"),
            *(asked["job"][:20], "--admin-url", cluster.admin_url),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    for stage in asked["stages"]:
        assert stage["name"].replace("_", " ") in ran.stdout
    assert LABEL in ran.stdout


async def test_top_shows_the_workers(cluster, asked):
    async with OperatorClient(cluster.admin_url) as client:
        app = TopApp(client, cluster.admin_url, interval_s=60)
        async with app.run_test(size=(120, 40)):
            table = app.query_one("#workers")
            names = [table.get_row_at(row)[0] for row in range(table.row_count)]
            assert names == ["prefill-0", "decode-0"]
            assert str(app.query_one("#trouble").content) == ""


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the path")
def test_the_page_draws_the_cluster_and_takes_what_clients_say_for_text(
    gateway_admin, asked, tmp_path
):
    """A client's label that would be markup is shown as it is."""
    browsed = subprocess.run(
        [
            str(CHROMIUM),
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *(f"--user-data-dir={tmp_path}", "--enable-logging=stderr"),
            *("--virtual-time-budget=8000", "--dump-dom"),
            f"{gateway_admin}/#search=decode-0&request={asked['job']}",
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    page = browsed.stdout
    complaints = [line for line in browsed.stderr.splitlines() if "CONSOLE" in line]
    assert complaints == []
    assert 'id="problem" class="notice" role="alert" hidden' in page
    assert 'id="state" class="badge good" role="status">live<' in page
    for process in ("gateway", "scheduler", "prefill-0", "decode-0"):
        assert f"<h4>{process}</h4>" in page
    assert re.search(r'aria-label="KV blocks: owned \d+, in transfer 0, cached \d+', page)
    assert page.count("<figure>") == 2
    assert asked["job"] in page
    assert page.count('class="stage"') == len(asked["stages"])
    assert "&lt;img src=x onerror=alert(1)&gt;" in page and "<img" not in page
