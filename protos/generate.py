"""Generates the protobuf stubs beside their .proto files.

`python -m protos.generate` writes them; `--check` only reports whether the committed stubs are
those that the .proto files give, and exits with 1 if not.
"""

import argparse
import filecmp
import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent
GENERATED = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")
# protoc writes imports relative to its own root; in Python that root is the package `protos`.
_IMPORT = re.compile(r"^(\s*)(from|import) (tandem\.)", re.MULTILINE)
_NAME = re.compile(r"(?<![\w.\"'/])tandem\.((?:\w+\.)+\w+_pb2)\b")


def generate(out: Path) -> None:
    """Compiles every .proto below this folder into `out`, in the same subfolders."""
    from grpc_tools import protoc

    sources = sorted(str(path.relative_to(ROOT)) for path in ROOT.rglob("*.proto"))
    well_known = Path(protoc.__file__).parent / "_proto"
    flags = [f"--{kind}_out={out}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    for plugin in ("protoc-gen-mypy", "protoc-gen-mypy_grpc"):
        flags.append(f"--plugin={plugin}={Path(sys.executable).parent / plugin}")
    if protoc.main(["protoc", f"-I{ROOT}", f"-I{well_known}", *flags, *sources]) != 0:
        sys.exit("protoc failed")
    for pattern in GENERATED:
        for path in out.rglob(pattern):
            text = _IMPORT.sub(r"\1\2 protos.\3", path.read_text())
            path.write_text(_NAME.sub(r"protos.tandem.\1", text))


def main() -> None:
    """Writes the stubs, or checks the committed ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        generate(ROOT)
        return
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder)
        generate(fresh)
        wanted = {path.relative_to(fresh) for kind in GENERATED for path in fresh.rglob(kind)}
        present = {path.relative_to(ROOT) for kind in GENERATED for path in ROOT.rglob(kind)}
        stale = sorted(
            str(path)
            for path in wanted | present
            if path not in wanted & present or not filecmp.cmp(fresh / path, ROOT / path, False)
        )
    if stale:
        sys.exit(f"stubs differ from their .proto files (run `make proto`): {', '.join(stale)}")


if __name__ == "__main__":
    main()
