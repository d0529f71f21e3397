"""Nothing that people read or run fetches `roundtable` from the public index: that is a stranger's."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from roundtable.doctor.machine_checks import machine

ROOT = Path(__file__).resolve().parents[2]
TEXTS = {".cfg", ".in", ".json", ".md", ".py", ".sh", ".toml", ".txt", ".yaml", ".yml"}
NAMES = {"Dockerfile", "Makefile", "run"}
FETCHES = re.compile(
    r"\broundtable\[[a-z]|pipx? (?:install|upgrade|download|uninstall)(?: -\S+)* '?roundtable(?![-\w])"
)


def test_the_strangers_package_is_named_nowhere() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    found = [
        f"{name}:{number}: {line.strip()}"
        for name in listed.stdout.splitlines()
        if (Path(name).suffix in TEXTS or Path(name).name in NAMES) and (ROOT / name).is_file()
        for number, line in enumerate((ROOT / name).read_text().splitlines(), 1)
        if FETCHES.search(line)
    ]
    assert not found, found


def test_the_pattern_finds_what_must_not_stand() -> None:
    wrong = ("pip install 'round" + "table[server]'", "pipx upgrade round" + "table", "round" + "table[s3]")
    right = (
        "pip install 'roundtable-fl[server]'",
        "pipx upgrade roundtable-fl",
        "systemctl start roundtable",
    )
    assert [bool(FETCHES.search(line)) for line in (*wrong, *right)] == [True] * 3 + [False] * 3


def test_the_doctor_names_the_stranger_beside_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = tmp_path / "roundtable-0.4.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: roundtable\nVersion: 0.4\n")
    (about / "top_level.txt").write_text("roundtable\n")
    (about / "RECORD").write_text("roundtable/__init__.py,,\n")
    before = [check.state for inquiry in machine() if inquiry.name == "versions" for check in inquiry.run()]
    monkeypatch.syspath_prepend(str(tmp_path))
    found = [check for inquiry in machine() if inquiry.name == "versions" for check in inquiry.run()]
    assert "fail" not in before
    assert [(check.state, check.message) for check in found if check.state == "fail"] == [
        ("fail", "roundtable brings another package 'roundtable'")
    ]
