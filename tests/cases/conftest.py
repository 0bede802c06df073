"""The gateway over a scripted cluster, as its unit tests have it, for cases from the field.

docs/cases.md lists every case and where it is tested.
"""

import importlib.util
import sys
from pathlib import Path

_HARNESS = Path(__file__).parents[1] / "unit" / "gateway" / "conftest.py"
_NAME = "gateway_harness"


def _load():
    spec = importlib.util.spec_from_file_location(_NAME, _HARNESS)
    module = importlib.util.module_from_spec(spec)
    sys.modules[_NAME] = module  # where its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


_harness = _load()
card = _harness.card
tokenizer = _harness.tokenizer
backend = _harness.backend
config = _harness.config
api = _harness.api
http = _harness.http
