"""Each extra by itself: a coordinator without the agent's libraries, an agent without the coordinator's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_BLOCKED = """
import sys
from importlib.abc import MetaPathFinder

class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in sys.argv[1].split(","):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from roundtable.cli.main import run
sys.exit(run(sys.argv[2:]))
"""
SERVER = "sqlalchemy,alembic,fsspec,psycopg"
OTHERS = "ray,opentelemetry,matplotlib,jwt,pandas,tensorboard,mlflow,wandb"


def run(without: str, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _BLOCKED, f"{without},{OTHERS}", *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    from roundtable.core.identity.credentials import create_ca, issue

    create_ca(tmp_path / "ca")
    issue(tmp_path / "ca", "hub", "coordinator", tmp_path / "hub", hosts=("127.0.0.1",))
    issue(tmp_path / "ca", "alder", "agent", tmp_path / "credentials")
    (tmp_path / "toy.py").write_text("class Toy: pass\n")
    (tmp_path / "agent.toml").write_text(
        'coordinator = "127.0.0.1:1"\n[tasks]\ntoy = "toy.py:Toy"\n[limits]\ndevice = "cuda:99"\n'
    )
    return tmp_path


def test_an_agent_starts_without_the_coordinators_libraries(folder: Path) -> None:
    # It comes as far as looking for the GPU that its file demands: all its modules are loaded by then.
    done = run(SERVER, "client", folder=folder)
    assert done.returncode == 1
    assert "cuda:99" in done.stderr
    assert "pip install" not in done.stderr


def test_a_coordinator_starts_without_the_agents_libraries(folder: Path) -> None:
    words = ("server", "--credentials", "hub", "--listen", "127.0.0.1:0", "--state")
    (folder / "file").write_text("")
    done = run("opacus,psycopg", *words, "file", folder=folder)
    # All that it needs is loaded, and it comes as far as its folder, which is a file.
    assert done.returncode == 1
    assert "File exists" in done.stderr


@pytest.mark.parametrize(
    ("without", "words", "library", "extra"),
    [
        (SERVER, ("server", "--credentials", "hub"), "sqlalchemy", "server"),
        ("alembic", ("server", "--credentials", "hub"), "alembic", "server"),
        ("fsspec", ("server", "--credentials", "hub"), "fsspec", "server"),
    ],
)
def test_what_is_missing_is_named_with_its_extra(
    folder: Path, without: str, words: tuple[str, ...], library: str, extra: str
) -> None:
    done = run(without, *words, folder=folder)
    assert done.returncode == 2
    assert f"needs the library '{library}', which is not installed" in done.stderr
    assert f"pip install 'roundtable-fl[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_traced_agent_without_the_extra(folder: Path) -> None:
    text = (folder / "agent.toml").read_text().replace("cuda:99", "cpu")
    (folder / "agent.toml").write_text(f'traces = "http://127.0.0.1:1/v1/traces"\n{text}')
    done = run(SERVER, "client", folder=folder)
    assert done.returncode == 2
    assert "pip install 'roundtable-fl[tracing]'" in done.stderr
