"""Small virtual environments for one purpose each, kept below build/ and made anew when their pins change."""

from __future__ import annotations

import subprocess
import venv
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
