"""Compiles the native kernels, once for each environment, kind of CPU and state of the sources.

The library lies in a folder of the environment, else in the user's cache, under a name that hashes
all it was made from. Processes that start together build it once: one holds a file lock, the others
wait for it. Starts without torch.
"""

import contextlib
import fcntl
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

_SOURCES = Path(__file__).with_name("src")
_FLAGS = (
    *("-O3", "-march=native", "-std=c++17", "-fPIC", "-fopenmp"),
    *("-Wall", "-Wextra", "-Werror=return-type"),
    # GCC's own headers of the intrinsics set these off.
    *("-Wno-uninitialized", "-Wno-maybe-uninitialized"),
)
_CPU_FLAGS = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16")
_COMPILERS = ("g++", "c++")
_COMPILE_TIMEOUT_S = 120.0


class NativeUnavailable(Exception):
    """The kernels cannot be had here; the text says why, in one line."""


def ensure_built() -> Path:
    """The library's path; compiles it where it is not there yet, which takes some seconds.

    Raises NativeUnavailable.
    """
    cpu_flags = _cpu_flags()
    missing = [flag for flag in _CPU_FLAGS if flag not in cpu_flags]
    if missing:
        raise NativeUnavailable(f"the CPU has no {', '.join(missing)}")
    openmp = _openmp()
    name = f"kernels-{_key(cpu_flags, openmp)}.so"
    folders = (Path(sys.prefix) / "share" / "tandem-native", _user_cache() / "native")
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    compiler = _compiler()
    why = ""
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with _locked(folder / "lock"):
                if not (folder / name).is_file():
                    _build(compiler, openmp, folder / name)
        except OSError as error:
            why = f"cannot write {folder}: {error.strerror}"
        else:
            return folder / name
    raise NativeUnavailable(why)


def _cpu_flags() -> frozenset[str]:
    if platform.machine() not in ("x86_64", "AMD64") or sys.platform != "linux":
        raise NativeUnavailable(f"there are none for {platform.machine()} and {sys.platform}")
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def _openmp() -> Path:
    """The OpenMP runtime that torch brings: a second one would bring threads of its own."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise NativeUnavailable("torch is not installed")
    found = sorted((Path(spec.origin).parent / "lib").glob("libgomp*.so*"))
    if not found:
        raise NativeUnavailable("torch brings no libgomp to link with")
    return found[0]


def _compiler() -> str:
    for name in (os.environ.get("CXX"), *_COMPILERS):
        if name and (path := shutil.which(name)):
            return path
    raise NativeUnavailable("no C++ compiler: neither CXX nor g++ nor c++")


def _key(cpu_flags: frozenset[str], openmp: Path) -> str:
    digest = xxhash.xxh3_128("\0".join((*_FLAGS, *sorted(cpu_flags), str(openmp))).encode())
    for path in sorted(_SOURCES.iterdir()):
        digest.update(f"\0{path.name}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _user_cache() -> Path:
    base = os.environ.get("TANDEM_CACHE")
    if base:
        return Path(base).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tandem"


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Waits for whoever builds; a build has a deadline, and a process's end frees its lock."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(compiler: str, openmp: Path, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=".new-") as folder:
        sources = sorted(_SOURCES.glob("*.cpp"))
        objects = [Path(folder, source.stem + ".o") for source in sources]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(
                pool.map(
                    lambda pair: _run(compiler, *_FLAGS, "-c", str(pair[0]), "-o", str(pair[1])),
                    zip(sources, objects, strict=True),
                )
            )
        made = Path(folder, library.name)
        # By its path and without -fopenmp, so that no other OpenMP runtime is linked.
        _run(compiler, "-shared", *map(str, objects), str(openmp), "-o", str(made))
        made.replace(library)


def _run(*command: str) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        first = (errors or done.stderr.splitlines() or [f"exit code {done.returncode}"])[0]
        raise NativeUnavailable(f"{command[0]} failed: {first.strip()}")


def main() -> None:
    """For the set-up of an environment: what is missing is said and is no failure."""
    try:
        print(f"native kernels: {ensure_built()}")
    except NativeUnavailable as error:
        print(f"no native kernels, torch's are used: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
