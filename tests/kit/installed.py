"""A package of somebody else's, as an installer leaves it in a folder of `sys.path`."""

from __future__ import annotations

from pathlib import Path

import pytest


def install(
    folder: Path, monkeypatch: pytest.MonkeyPatch, module: str, code: str, points: dict[str, dict[str, str]]
) -> None:
    """Puts a module with entry points (group → name → object) where this process finds it."""
    information = folder / f"{module}-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    lines = []
    for group, named in points.items():
        lines += [f"[{group}]", *(f"{name} = {module}:{attribute}" for name, attribute in named.items())]
    (information / "entry_points.txt").write_text("\n".join(lines) + "\n")
    (folder / f"{module}.py").write_text(code)
    monkeypatch.syspath_prepend(folder)
