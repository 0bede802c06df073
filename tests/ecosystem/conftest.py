"""Programs of other projects, each from a virtual environment of its own, and a cluster for them.

`NAME.txt` beside this file is what `.venv/ecosystem/NAME` holds; `make test-ecosystem` makes it.
"""

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.cluster import Endpoints, Settings, serving

ROOT = Path(__file__).resolve().parents[2]
_SETTINGS: Settings = {
    "log_format": "json",
    # The default model's template knows no tools: it is told of them in words.
    "gateway": {"vllm_engine": True, "tool_parser": "hermes"},
    "engine": {
        "dtype": "float32",
        "threads": 1,
        "prefill_kv_bytes": 2**29,
        "decode_kv_bytes": 2**29,
    },
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.ecosystem)


@pytest.fixture(scope="session")
def endpoints() -> Iterator[Endpoints]:
    """A cluster of the default model, for tests that leave it as they found it."""
    with serving(_SETTINGS) as found:
        yield found


@pytest.fixture(scope="session")
def programs() -> Callable[[str], Path]:
    """The folder of programs of the environment of this name."""

    def find(name: str) -> Path:
        folder = ROOT / ".venv" / "ecosystem" / name / "bin"
        if not folder.is_dir():
            pytest.skip(f"{folder} is missing: make test-ecosystem")
        return folder

    return find


@pytest.fixture(scope="session")
def free_port() -> Callable[[], int]:
    """A port that nobody listens on now."""

    def find() -> int:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            return int(listener.getsockname()[1])

    return find
