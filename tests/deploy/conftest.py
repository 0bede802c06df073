"""What checks deploy/: programs that `make test-deploy` installs, or that are on the path."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "tandem"
PRESETS = ("1p3d", "2p2d", "3p1d", "cpu")
# Laid over a preset.
TWO_MODELS = "two-models"
Render = Callable[..., list[dict[str, Any]]]


def _program(name: str) -> Path:
    installed = Path(sys.prefix) / "deploy" / "bin" / name
    if installed.exists():
        return installed
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: make test-deploy")
    return Path(found)


@pytest.fixture(scope="session")
def program() -> Callable[[str], Path]:
    """Finds a program, or skips the test and says how to have it."""
    return _program


@pytest.fixture(scope="session")
def helm() -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """Runs helm in the chart's folder."""
    binary = _program("helm")

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [str(binary), *arguments],
            cwd=CHART,
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "HELM_NO_PLUGINS": "1"},
        )

    return run


def given(preset: str, values: Sequence[str] = ()) -> list[str]:
    """helm's arguments: one preset, or several joined by `+`, and values that are set over them."""
    arguments = []
    for name in filter(None, preset.split("+")):
        arguments += ["-f", f"values-{name}.yaml"]
    for value in values:
        arguments += ["--set", value]
    return arguments


@pytest.fixture(scope="session")
def render(helm: Callable[..., "subprocess.CompletedProcess[str]"]) -> Render:
    """The chart's objects, of presets and with values set (`gateway.replicas=3`)."""

    def objects(preset: str = "", *values: str) -> list[dict[str, Any]]:
        done = helm("template", "tandem", ".", *given(preset, values))
        assert done.returncode == 0, done.stderr
        return [each for each in yaml.safe_load_all(done.stdout) if each]

    return objects


@pytest.fixture(scope="session")
def schema() -> dict[str, Any]:
    """The chart's schema of values."""
    found: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
    return found
