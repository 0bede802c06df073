"""`make test-gpu`: proves on a machine with a GPU what the other tests cannot, within ten minutes.

Without a GPU it says so in one line and ends with 0. `--dry-run` takes the same functions through a
small model on the CPU, with Triton's interpreter, and leaves out what needs a device. Ends with one
JSON line; exits with 1 where something is wrong. Needs no network.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

_PART_TIMEOUT_S = 240.0
_CUDA_IPC_TESTS = "tests/contract/test_transports_cuda_ipc.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One thing to find out."""

    name: str
    run: Callable[[], dict[str, object]]
    needs_gpus: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with small numbers")
    parser.add_argument("--only", help="parts by name, with commas between")
    options = parser.parse_args()
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    import torch

    num_gpus = 0 if options.dry_run else torch.cuda.device_count()
    if not options.dry_run and num_gpus == 0:
        print("There is no GPU here: nothing was run. --dry-run takes what can be through a CPU.")
        return
    parts = _parts(options.dry_run)
    if options.only:
        wanted = set(options.only.split(","))
        if unknown := wanted - {part.name for part in parts}:
            parser.error(f"--only: no part is called {', '.join(sorted(unknown))}")
        parts = [part for part in parts if part.name in wanted]
    results = {part.name: _outcome(part, num_gpus) for part in parts}
    device = "cpu, dry run" if options.dry_run else torch.cuda.get_device_name(0)
    wrong = [name for name, result in results.items() if result["state"] == "wrong"]
    print(json.dumps({"device": device, "gpus": num_gpus, "wrong": wrong, "parts": results}))
    if wrong:
        sys.exit(1)


def _outcome(part: Part, num_gpus: int) -> dict[str, object]:
    """What came of a part, told in one line as it ends."""
    begin_s = time.monotonic()
    result: dict[str, object]
    if num_gpus < part.needs_gpus:
        result = {"state": "not run", "why": f"needs {part.needs_gpus} GPU(s), {num_gpus} here"}
    else:
        try:
            result = {"state": "right", **part.run()}
        except Exception as error:  # whatever it is, the other parts are still of interest
            result = {"state": "wrong", "why": f"{type(error).__name__}: {error}"}
    took_s = time.monotonic() - begin_s
    print(f"{part.name}: {result['state']} {result.get('why', '')} ({took_s:.1f} s)", flush=True)
    return result


def _parts(dry: bool) -> list[Part]:
    from bench.gpu import checks, speeds
    from bench.gpu.place import dry_place, gpu_place

    place = dry_place() if dry else gpu_place()
    python = sys.executable
    return [
        Part(name="attention", run=lambda: checks.attention(place)),
        Part(name="rows", run=lambda: checks.rows(place)),
        Part(name="digests", run=lambda: checks.digests(place)),
        Part(name="fp8", run=lambda: checks.fp8(place)),
        Part(name="graphs", run=lambda: checks.graphs(place)),
        Part(name="speeds", run=lambda: speeds.measure(place)),
        Part(
            name="cuda_ipc",
            run=lambda: _command(
                python,
                "-m",
                "pytest",
                "-q",
                "-m",
                "gpu",
                _CUDA_IPC_TESTS,
            ),
            needs_gpus=1,
        ),
        # A prefill and a decode worker on one GPU, and the tokens of transformers.
        Part(
            name="cluster",
            run=lambda: _command(python, "-m", "bench.parity", "--transports", "cuda_ipc"),
            needs_gpus=1,
        ),
        # NCCL takes no two ranks on one GPU.
        Part(
            name="nccl",
            run=lambda: _command(
                python,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node=2",
                "-m",
                "bench.gpu.nccl_pair",
            ),
            needs_gpus=2,
        ),
    ]


def _command(*words: str) -> dict[str, object]:
    """Runs a command of the project. Raises RuntimeError with its last line where it fails."""
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=_PART_TIMEOUT_S, check=False
    )
    last = (done.stdout.strip().splitlines() or [""])[-1]
    if done.returncode:
        raise RuntimeError(f"{last} {(done.stderr.strip().splitlines() or [''])[-1]}")
    return {"said": last}


if __name__ == "__main__":
    main()
