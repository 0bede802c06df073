"""What the layering promises, seen from outside."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = (
    *("protos", "core", "engine", "kv_transfer", "gateway", "scheduler"),
    *("prefill_worker", "decode_worker", "deploy", "cli", "bench"),
)

_IMPORT_ALL = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
    if not found.name.startswith(tuple(sys.argv[2:])):
        importlib.import_module(found.name)
print(*({"torch", "transformers"} & set(sys.modules)))
"""


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_is_ours_and_not_another_distributions(name: str):
    module = importlib.import_module(name)
    assert module.__file__ is not None
    assert Path(module.__file__).resolve() == ROOT / name / "__init__.py"


# A worker that can serve either role is put together there; only its own process imports it.
WORKERS = "deploy.elastic."


@pytest.mark.parametrize("name", ["core", "gateway", "scheduler", "deploy", "cli"])
def test_every_module_of_a_light_package_starts_without_torch(name: str):
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT_ALL, name, WORKERS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


def test_the_import_contracts_are_kept():
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-logo", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
