"""A real Prometheus beside a real cluster: every panel and every alert gets data."""

import json
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy/prometheus/tandem.rules.yml"
MODEL = "smollm2-135m-instruct"
DEADLINE_S = 120.0

pytestmark = [
    pytest.mark.observability,
    pytest.mark.timeout(400),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed"),
]


class Load:
    """Asks a cluster until it is told to stop; now and then something that is refused."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(2)]

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, number: int) -> None:
        with httpx.Client(base_url=self._url, timeout=60, trust_env=False) as client:
            turn = 0
            while not self._stop.is_set():
                turn += 1
                text = f"Question {number}.{turn}: " + "tell me more " * (60 if turn % 2 else 2)
                body = {"model": MODEL, "prompt": text, "max_tokens": 6, "ignore_eos": True}
                client.post("/v1/completions", json=body).raise_for_status()
                refused = client.post("/v1/completions", json={**body, "model": "none"})
                assert refused.status_code == 404


class Prometheus:
    """A running one."""

    def __init__(self, folder: Path, sd_url: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        job = {"job_name": "tandem", "http_sd_configs": [{"url": sd_url, "refresh_interval": "1s"}]}
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(RULES)],
            "scrape_configs": [job],
        }
        (folder / "prometheus.yml").write_text(json.dumps(config))
        self._url = f"http://{address}"
        self.client = httpx.Client(base_url=f"{self._url}/api/v1", trust_env=False)
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address={address}",
                ],
                stdout=log,
                stderr=log,
            )

    def ready(self) -> bool:
        try:
            return httpx.get(f"{self._url}/-/ready", trust_env=False).status_code == 200
        except httpx.ConnectError:
            return False

    def close(self) -> None:
        self.client.close()
        self.process.terminate()
        self.process.wait(30)

    def query(self, expr: str) -> list[float]:
        """The values that the expression has now, without those that are no numbers."""
        response = self.client.get("/query", params={"query": expr}).json()
        assert response["status"] == "success", (expr, response)
        values = [float(each["value"][1]) for each in response["data"]["result"]]
        return [value for value in values if value == value]


@pytest.fixture(scope="module")
def cluster(start_cluster):
    # Prompts are handed over, so that there are transfers to be seen.
    return start_cluster(settings={"scheduler": {"local_prefill": "never"}})


@pytest.fixture(scope="module")
def prometheus(
    cluster, tmp_path_factory: pytest.TempPathFactory, eventually
) -> Iterator[Prometheus]:
    started = Prometheus(tmp_path_factory.mktemp("prometheus"), f"{cluster.admin_url}/sd")
    try:
        eventually(started.ready, "Prometheus serves", timeout_s=DEADLINE_S)
        with Load(cluster.http_url):
            yield started
    finally:
        started.close()


def _panels() -> Iterator[Any]:
    for path in sorted((ROOT / "deploy/dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                expr = target["expr"].replace("$__rate_interval", "30s").replace("$process", ".*")
                yield pytest.param(expr, id=f"{path.stem}: {panel['title']} {target['refId']}")


def _operands() -> Iterator[Any]:
    """What each alert compares: the sides of `and` and `unless`, without their thresholds."""
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            for part in re.split(r" (?:and|unless) ", rule["expr"] if "alert" in rule else ""):
                if part:
                    yield pytest.param(
                        re.sub(r" (?:>|<|==) [0-9.]+$", "", part), id=f"{rule['alert']}: {part}"
                    )


@pytest.mark.parametrize("expr", [*_panels(), *_operands()])
def test_every_panel_and_alert_has_data_under_load(prometheus: Prometheus, eventually, expr: str):
    eventually(lambda: bool(prometheus.query(expr)), f"data for {expr}", timeout_s=DEADLINE_S)


def test_every_process_is_found_and_every_rule_evaluates(prometheus: Prometheus, eventually):
    def up() -> bool:
        return prometheus.query('count(up{job="tandem"} == 1)') == [4.0]

    eventually(up, "four targets are up", timeout_s=DEADLINE_S)
    groups = prometheus.client.get("/rules").json()["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) > 15
    assert {rule["health"] for rule in rules} == {"ok"}, [
        r["lastError"] for r in rules if "lastError" in r
    ]


@pytest.mark.parametrize(
    "command",
    [
        ("check", "config", "prometheus.yml"),
        ("check", "rules", "tandem.rules.yml"),
        ("test", "rules", "tandem.rules.test.yml"),
    ],
)
def test_promtool_finds_no_fault(command: tuple[str, str, str]):
    *words, file = command
    done = subprocess.run(
        ["promtool", *words, file], cwd=RULES.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
