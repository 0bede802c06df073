"""The wire's description, the stubs made of it, and what may be done with bytes from it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = (
    *("protos", "core", "engine", "kv_transfer", "gateway", "scheduler"),
    *("prefill_worker", "decode_worker", "deploy", "cli", "bench"),
)
# Each of these runs code that the bytes name.
FORBIDDEN = re.compile(
    r"\bpickle\b|\bmarshal\b|\bshelve\b|\bdill\b|torch\.load\(|yaml\.load\(|yaml\.unsafe_load"
    r"|\beval\(|(?<![\w.])exec\(|allow_pickle=True|trust_remote_code=True"
)


def _run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


def test_the_committed_stubs_are_those_of_the_proto_files():
    done = _run(sys.executable, "-m", "protos.generate", "--check")
    assert done.returncode == 0, done.stderr


def test_the_proto_files_pass_buf_lint():
    buf = Path(sys.executable).with_name("buf")
    if not buf.exists():
        pytest.skip("the buf binary is not installed")
    done = _run(buf, "lint")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("package", PACKAGES)
def test_no_code_comes_in_with_data(package: str):
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if FORBIDDEN.search(line)
    ]
    assert found == []


def test_the_search_for_forbidden_calls_finds_them():
    for line in ("import pickle", "torch.load(f)", "yaml.load(x)", "eval(text)", "exec(text)"):
        assert FORBIDDEN.search(line), line
    for line in ("model.eval", "cursor.exec(", "torch.loader", "yaml.safe_load(x)"):
        assert not FORBIDDEN.search(line), line
