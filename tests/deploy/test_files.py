"""The image's recipe and the load balancers' files, as their own programs judge them."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.deploy.conftest import ROOT

LB = ROOT / "deploy" / "lb"
CHECKS = {
    "envoy": ("--mode", "validate", "--log-level", "error", "-c", str(LB / "envoy.yaml")),
    "haproxy": ("-c", "-f", str(LB / "haproxy.cfg")),
    "nginx": ("-t", "-p", "FOLDER", "-c", str(LB / "nginx.conf")),
    "hadolint": (str(ROOT / "deploy" / "Dockerfile"),),
}


@pytest.mark.deploy
@pytest.mark.parametrize("name", CHECKS)
def test_its_own_program_has_nothing_to_say_against_it(program, name: str, tmp_path: Path):
    arguments = [str(tmp_path) if each == "FOLDER" else each for each in CHECKS[name]]
    done = subprocess.run(
        [str(program(name)), *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if name == "hadolint":
        assert done.stdout == ""


def test_the_image_runs_as_nobody_special_and_is_asked_for_its_health():
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    assert re.search(r"^USER 10001:10001$", text, re.M)
    assert re.search(r"^HEALTHCHECK ", text, re.M)
    pinned = (ROOT / "constraints.txt").read_text()
    (torch,) = re.findall(r"torch==[0-9.]+", text)
    assert torch in pinned


def test_every_package_that_is_installed_is_copied_into_the_image():
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    copied = set(re.findall(r"^COPY (\w+) \1$", text, re.M))
    packages = re.search(
        r"^packages = \[\n(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S
    )
    assert packages is not None
    assert copied == set(re.findall(r'"(\w+)"', packages[1]))


@pytest.mark.parametrize("file", ["envoy.yaml", "haproxy.cfg", "nginx.conf"])
def test_each_balancer_listens_where_the_others_do_and_knows_the_same_gateways(file: str):
    text = (LB / file).read_text()
    for port in (8000, 50051, 8100, 8101, 50151, 50152):
        assert re.search(rf"\b{port}\b", text), port
