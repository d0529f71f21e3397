"""Generates proto/*_pb2*.py with a generator old enough that the code loads on protobuf 4.25 to 7.

Code from a newer generator refuses older runtimes, so the generator is pinned here and lives in an
environment of its own. `--check` writes nothing and fails if the committed code differs.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from environments import ROOT, environment

PINS = ["grpcio-tools==1.62.3", "protobuf==4.25.8", "grpcio==1.62.3", "setuptools<81", "mypy-protobuf==3.6.0"]


def generate(out: Path) -> list[Path]:
    """Writes the generated files to `out` and returns their paths."""
    python = environment("protoc", PINS)
    command = [
        str(python),
        "-m",
        "grpc_tools.protoc",
        f"-Iroundtable/proto={ROOT / 'proto'}",
        f"--plugin=protoc-gen-mypy={python.parent / 'protoc-gen-mypy'}",
        f"--plugin=protoc-gen-mypy_grpc={python.parent / 'protoc-gen-mypy_grpc'}",
        f"--python_out={out}",
        f"--grpc_python_out={out}",
        f"--mypy_out=quiet:{out}",
        f"--mypy_grpc_out=quiet:{out}",
        *(f"roundtable/proto/{file.name}" for file in sorted((ROOT / "proto").glob("*.proto"))),
    ]
    subprocess.run(command, check=True)
    return sorted((out / "roundtable" / "proto").iterdir())


def main() -> int:
    """Generates, or with --check compares."""
    check = "--check" in sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        drifted = []
        for file in generate(Path(folder)):
            committed = ROOT / "proto" / file.name
            if check and (not committed.exists() or committed.read_bytes() != file.read_bytes()):
                drifted.append(committed.name)
            elif not check:
                shutil.copyfile(file, committed)
    if drifted:
        print(
            f"{', '.join(drifted)} differ from what the .proto files give; run python tools/generate_proto.py"
        )
    return 1 if drifted else 0


if __name__ == "__main__":
    raise SystemExit(main())
