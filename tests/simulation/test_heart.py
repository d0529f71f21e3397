"""The example of four hospitals: the data are those that were published, and each silo prepares its own."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import roundtable as rt
from roundtable.core.task import load_task


@pytest.fixture
def heart(root: Path) -> ModuleType:
    return sys.modules[type(load_task("heart.py", root / "examples" / "heart")).__module__]


def test_the_files_are_those_that_are_attributed(root: Path) -> None:
    data = root / "examples" / "heart" / "data"
    said = (data / "README.md").read_text()
    for file in sorted(data.glob("*.data")):
        assert f"| `{file.name}` | {hashlib.md5(file.read_bytes()).hexdigest()} |" in said


def test_a_silo_with_its_own_file_has_what_its_client_has_in_a_simulation(
    heart: ModuleType, root: Path
) -> None:
    job = rt.load_job(root / "examples" / "heart" / "job.toml")
    from roundtable.simulation.world.partition import make_partition

    partition = make_partition(job.simulation.partition, job.seed)
    for index, (name, train, test) in enumerate(
        zip(heart.HOSPITALS, (199, 172, 30, 85), (104, 89, 16, 45), strict=True)
    ):
        simulated = heart.Heart().data(rt.Site(name, index, 4, partition=partition))
        file = root / "examples" / "heart" / "data" / f"processed.{name}.data"
        own = heart.Heart().data(rt.Site(name, options={"heart": str(file)}))
        assert [len(half.diseased) for half in own] == [train, test]
        for one, other in zip(simulated, own, strict=True):
            torch.testing.assert_close(one.features, other.features, rtol=0, atol=0)
            assert torch.equal(one.diseased, other.diseased)
        # By label, where each has more than two patients: so the halves are as ill as each other.
        ill = [float(half.diseased.mean()) for half in own]
        assert abs(ill[0] - ill[1]) * test < 1.01
        assert own[0].features.isfinite().all()
        # Cholesterol is 0 for all of Switzerland: such a feature says nothing, and stays finite.
        spread = own[0].features.std(dim=0)
        torch.testing.assert_close(spread[spread > 0], torch.ones_like(spread[spread > 0]))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("63,1,4", r"mine.data:2: 3 values where a patient has 14"),
        ("63,1,9,140,260,0,1,112,1,3,2,?,?,2", r"mine.data:2: column 3 is 9, not one of \(1.0, 2.0"),
        ("old,1,4,140,260,0,1,112,1,3,2,?,?,2", r"mine.data:2: could not convert string to float: 'old'"),
    ],
)
def test_a_line_that_is_no_patient_is_named(heart: ModuleType, tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "mine.data"
    file.write_text(f"63,1,4,140,260,0,1,112,1,3,2,?,?,2\n{line}\n")
    with pytest.raises(ValueError, match=said):
        heart.read(file)
    with pytest.raises(FileNotFoundError, match=r"name the hospital's processed.\*.data file as heart"):
        heart.read(tmp_path / "other.data")
