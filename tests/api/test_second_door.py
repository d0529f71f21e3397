"""The second door's scripts as they are written: two silos, a real coordinator, a whole job."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from roundtable.child_processes import Children
from roundtable.core import save_model
from roundtable.core.identity.credentials import create_ca, issue
from roundtable.demo import await_agents, free_port
from roundtable.operator import OperatorClient
from roundtable.preparation import prepare

SILOS = ("north", "south")


@dataclass(frozen=True)
class Door:
    """A running coordinator's address, the folder of everything, and its process."""

    address: str
    folder: Path
    children: Children


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    """A coordinator, and a folder with credentials and two silos' data."""
    sklearn = pytest.importorskip("sklearn.datasets")
    folder = tmp_path_factory.mktemp("door")
    create_ca(folder / "ca")
    issue(folder / "ca", "hub", "coordinator", folder / "hub", ["127.0.0.1"])
    issue(folder / "ca", "ada", "operator", folder / "ada")
    where = f"127.0.0.1:{free_port()}"
    images, labels = sklearn.load_digits(return_X_y=True)
    for number, name in enumerate(SILOS):
        issue(folder / "ca", name, "agent", folder / name / "credentials")
        np.savez(folder / name / "digits.npz", images=images[number::2], labels=labels[number::2])
        (folder / name / "agent.toml").write_text(f'coordinator = "{where}"\n')
    with Children(folder / "logs") as children:
        options = ["--listen", where, "--state", str(folder / "state"), "--credentials", str(folder / "hub")]
        children.start("hub", ["server", *options])
        yield Door(where, folder, children)


@pytest.mark.parametrize(
    ("name", "least"), [("network", 0.93), pytest.param("linear", 0.88, marks=pytest.mark.slow)]
)
def test_the_script_takes_part_until_the_job_is_over(
    door: Door, root: Path, name: str, least: float, tmp_path: Path
) -> None:
    example = root / "examples" / "second_door"
    scripts = [
        subprocess.Popen(
            [sys.executable, str(example / f"train_{name}.py"), "agent.toml", "digits.npz"],
            cwd=door.folder / silo,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for silo in SILOS
    ]
    try:
        prepared = prepare(example / f"{name}.toml")
        save_model(tmp_path / "initial.safetensors", prepared.model)
        with OperatorClient(door.address, door.folder / "ada") as operator:
            await_agents(operator, door.children, len(SILOS))
            job = operator.submit(prepared.job, tmp_path / "initial.safetensors")
            for _ in operator.watch(job.id):
                pass
            detail = operator.job(job.id)
        said = [script.communicate(timeout=60) for script in scripts]
    finally:
        for script in scripts:
            script.kill()
    assert detail.job.status == "finished"
    assert [script.returncode for script in scripts] == [0, 0], said
    for out, _ in said:
        assert "round 5 of 5" in out
    correct, total = json.loads(detail.history[-1])["evaluation"]["accuracy"]
    assert correct / total > least
