"""`make test-gpu`: what it says without a GPU, and some of its checks on a CPU."""

import json
import sys
from dataclasses import replace

import pytest
import torch

from bench.gpu import checks
from bench.gpu.__main__ import main
from bench.gpu.parts import random_model
from bench.gpu.place import SMALL, dry_place
from engine.kernel_choice import choose_kernels
from engine.triton import runtime

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here"),
    pytest.mark.skipif(not runtime.interpreted(), reason="triton runs in its interpreter here"),
]


def told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *options: str
) -> list[str]:
    """The lines of the command."""
    monkeypatch.setattr(sys, "argv", ["bench.gpu", *options])
    main()
    return capsys.readouterr().out.splitlines()


def test_without_a_gpu_it_says_so_in_one_line_and_is_content(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (line,) = told(monkeypatch, capsys)
    assert line.startswith("There is no GPU here")


def test_parts_that_need_a_gpu_are_told_and_the_last_line_is_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton")
    lines = told(monkeypatch, capsys, "--dry-run", "--only", "fp8,digests,cuda_ipc,nccl")
    report = json.loads(lines[-1])
    states = {name: part["state"] for name, part in report["parts"].items()}
    assert states == {
        "fp8": "right",
        "digests": "right",
        "cuda_ipc": "not run",
        "nccl": "not run",
    }


def test_a_part_that_is_wrong_is_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(place: object) -> dict[str, object]:
        raise checks.Wrong("off by 3")

    monkeypatch.setattr(checks, "fp8", fails)
    with pytest.raises(SystemExit) as ended:
        told(monkeypatch, capsys, "--dry-run", "--only", "fp8")
    assert ended.value.code == 1
    assert "fp8: wrong Wrong: off by 3" in capsys.readouterr().out


def test_a_wrong_digest_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(checks.xxhash, "xxh3_64_intdigest", lambda data, seed: 1)
    with pytest.raises(checks.Wrong, match="digests"):
        checks.digests(dry_place())


def test_a_random_model_is_the_same_each_time() -> None:
    tiny = replace(SMALL, num_layers=1)
    kernels = choose_kernels("torch", torch.float32, tiny.head_dim)
    one, other = (random_model(tiny, torch.float32, torch.device("cpu"), kernels) for _ in range(2))
    hidden = torch.ones((1, tiny.hidden_size))
    assert torch.equal(one.logits(hidden), other.logits(hidden))
