"""How both benchmarks end: one line of JSON, and an exit code that says whether a promise held."""

import json
from dataclasses import asdict
from typing import Any

from bench.environment import describe


def tell(bench: str, found: Any, **derived: float) -> int:
    """Prints the figures of `found`, a dataclass that knows whether it is `kept`.

    `derived` are figures that follow from its fields. Gives the exit code.
    """
    document = {"bench": bench, **asdict(found), **derived, "kept": found.kept}
    print(json.dumps({**document, "machine": describe()}))
    return 0 if found.kept else 1
