"""agent.toml: checked strictly, with the line of each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from roundtable.client import load_agent_config
from roundtable.core.errors import ConfigError

GOOD = """\
coordinator = "hub.example.org:7443"
state = "/var/lib/roundtable"

[tasks]
digits = "tasks/digits.py:Digits"

[data]
path = "/srv/digits.npz"
columns = ["a", "b"]

[metadata]
region = "north"

[limits]
device = "cpu"
threads = 2
"""


def load(folder: Path, text: str) -> object:
    path = folder / "agent.toml"
    path.write_text(text)
    return load_agent_config(path)


def test_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "agent.toml"
    path.write_text(GOOD)
    config = load_agent_config(path, {"limits.threads": 3})
    assert config.coordinator == "hub.example.org:7443"
    assert config.credentials == tmp_path / "credentials"
    assert config.state == Path("/var/lib/roundtable")
    assert config.tasks == {"digits": "tasks/digits.py:Digits"}
    assert config.data == {"path": "/srv/digits.npz", "columns": ["a", "b"]}
    assert config.metadata == {"region": "north"}
    assert (config.device, config.threads, config.cached_models) == ("cpu", 3, 3)
    assert config.folder == tmp_path


@pytest.mark.parametrize("task", ["digits", "digits.py", "digits.py:Digits", "examples/digits.py:Other"])
def test_a_task_is_known_by_its_plain_name(tmp_path: Path, task: str) -> None:
    config = load(tmp_path, GOOD)
    assert config.reference_of(task) == "tasks/digits.py:Digits"  # type: ignore[attr-defined]
    assert config.reference_of("letters") is None  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("hub.example.org:7443", "hub.example.org"), r"agent.toml:1: coordinator: .*host:port"),
        (("threads = 2", "thread = 2"), r"agent.toml:16: limits.thread: unknown key; did you mean 'threads'"),
        (("threads = 2", 'threads = "two"'), r"agent.toml:16: limits.threads"),
        (('digits = "tasks/digits.py:Digits"', "digits = 5"), r"agent.toml:5: tasks.digits"),
        (('coordinator = "hub.example.org:7443"', ""), r"coordinator: missing"),
        (("[limits]", "[limits"), r"not valid TOML"),
        (
            ('digits = "tasks/digits.py:Digits"', "\n".join(f't{n} = "m:T"' for n in range(1001))),
            r"tasks: .*at most 1000 items",
        ),
    ],
)
def test_each_mistake_is_named_with_its_line(tmp_path: Path, change: tuple[str, str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load(tmp_path, GOOD.replace(*change))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml: cannot be read"):
        load_agent_config(tmp_path / "absent.toml")
