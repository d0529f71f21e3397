"""The three doors for code that a job names."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from roundtable.core.errors import ConfigError
from roundtable.core.plugins import doors
from roundtable.core.plugins.doors import names, resolve

GROUP = "roundtable.aggregation_rules"
BUILTINS = {"mean": 1, "median": 2}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    points = {
        "mine": EntryPoint("mine", "math:pi", GROUP),
        "broken": EntryPoint("broken", "there_is_no_such_module:x", GROUP),
    }

    def entry_points(group: str, name: str | None = None) -> list[EntryPoint]:
        return [point for key, point in points.items() if group == GROUP and name in (None, key)]

    monkeypatch.setattr(doors, "entry_points", entry_points)


@pytest.mark.usefixtures("installed")
def test_each_door_gives_its_object(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("value = 7\n")
    assert resolve("rule", "median", BUILTINS, GROUP) == 2
    assert resolve("rule", "mine", BUILTINS, GROUP) == pytest.approx(3.14159, abs=1e-4)
    assert resolve("rule", "own.py:value", BUILTINS, GROUP, tmp_path) == 7
    assert names(BUILTINS, GROUP) == ["broken", "mean", "median", "mine"]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("medain", ["unknown rule 'medain'", "did you mean 'median'?", "mean, median, mine; did you mean"]),
        ("broken", ["rule 'broken'", "there_is_no_such_module:x", "ModuleNotFoundError"]),
        ("absent.py:x", ["rule 'absent.py:x'", "there is no file", "absent.py"]),
        ("own.py:valeu", ["own.py has no 'valeu'", "did you mean 'value'?"]),
        ("own.py", ["file.py:Object"]),
        ("faulty.py:x", ["faulty.py failed", "ZeroDivisionError", "line 2"]),
    ],
)
def test_what_cannot_be_had_is_named(name: str, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("value = 7\n")
    (tmp_path / "faulty.py").write_text("\n1 / 0\n")
    with pytest.raises(ConfigError) as caught:
        resolve("rule", name, BUILTINS, GROUP, tmp_path)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_who_was_sent_the_job_imports_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("raise SystemExit('was run')\n")
    with pytest.raises(ConfigError, match=r"brings no code.*roundtable\.aggregation_rules"):
        resolve("rule", "own.py:value", BUILTINS, GROUP)
