"""The gateway starts light: no part of it brings in torch, not even through a library."""

import pkgutil
import subprocess
import sys

import gateway

_PROBE = """
import importlib, sys
for name in {names!r}:
    importlib.import_module(name)
print(sorted({{"torch", "transformers"}} & set(sys.modules)))
"""


def test_the_gateway_imports_neither_torch_nor_transformers():
    names = [
        f"gateway.{module.name}"
        for module in pkgutil.iter_modules(gateway.__path__)
        if module.name != "__main__"  # starts a process
    ]
    assert "gateway.api" in names and "gateway.servers" in names
    probe = [sys.executable, "-c", _PROBE.format(names=names)]
    done = subprocess.run(probe, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
