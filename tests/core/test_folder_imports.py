"""A task's file and what lies beside it: its own, whole, and nobody else's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from blake3 import blake3

from roundtable.core.errors import RoundtableError
from roundtable.core.plugins.code_hash import hash_of_code
from roundtable.core.task import ENTRY_POINTS, load_task
from roundtable.simulation import simulate
from roundtable.simulation.backends.processes import Processes

TASK = """
import torch
import roundtable as rt
from network import Network, Rows

class Near(rt.Task):
    def model(self): return Network()
    def data(self, site):
        import layers.sizes as sizes
        rows = torch.arange(sizes.WIDE * 6.0).reshape(6, -1) / 20 + site.index
        return Rows(rows), None
    def loss(self, model, batch): return (model(batch[0]) ** 2).mean()
"""
NETWORK = """
from torch import nn
from torch.utils.data import TensorDataset as Rows
from layers.sizes import WIDE
class Network(nn.Linear):
    def __init__(self): super().__init__(WIDE, 1)
"""
JOB = """
task = "near.py:Near"
rounds = 1
[simulation]
clients = 2
"""


def written(folder: Path, wide: int) -> Path:
    """A task with a module and a package beside it, which import each other."""
    (folder / "layers").mkdir(parents=True)
    (folder / "near.py").write_text(TASK)
    (folder / "network.py").write_text(NETWORK)
    (folder / "layers" / "__init__.py").touch()
    (folder / "layers" / "sizes.py").write_text(
        "from . import units\nfrom base import ONE\nWIDE = ONE * units.BY\n"
    )
    (folder / "layers" / "units.py").write_text(f"BY = {wide}\n")
    (folder / "base.py").write_text("ONE = 1\n")
    (folder / "job.toml").write_text(JOB)
    return folder


def pin(folder: Path) -> str:
    """What a silo's blake3 says of the task."""
    return hash_of_code("task", "near.py:Near", ENTRY_POINTS, folder)


def test_folders_have_modules_of_one_name_in_one_process_and_in_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, before = Processes._run, list(sys.path)
    monkeypatch.setattr(Processes, "_run", lambda self, *rest: (self.wait(), started(self, *rest))[1])
    for wide in (3, 5):
        job = written(tmp_path / str(wide), wide) / "job.toml"
        processes = {"simulation.backend": "processes", "simulation.workers": 2}
        alone = simulate(job, overrides={"simulation.backend": "sequential"})
        task = load_task("near.py", job.parent) if wide == 3 else None
        several = simulate(job, task, overrides=processes)
        assert "2 processes" in several.backend
        assert alone.model.layout.size == wide + 1
        assert alone.model.vector.equal(several.model.vector)
    assert sys.path == before
    assert not {"network", "layers", "base"} & sys.modules.keys()


def test_a_library_is_never_hidden(tmp_path: Path) -> None:
    folder = written(tmp_path, 2)
    for name in ("json", "torch", "xgboost"):
        (folder / f"{name}.py").write_text("raise SystemExit('was run')\n")
    with pytest.raises(
        RoundtableError, match=r"near\.py imports 'torch', which is .*torch\.py.*another name"
    ):
        load_task("near.py", folder)
    (folder / "torch.py").unlink()
    (folder / "numpy.py").write_text(
        "import numpy\nimport roundtable as rt\nclass Own(rt.ArrayTask):\n"
        "    def weights(self): return {'w': numpy.zeros(2)}\n"
    )
    assert load_task("numpy.py", folder, trains=False).weights()["w"].size == 2  # type: ignore[union-attr]
    assert load_task("near.py", folder).model().in_features == 2  # type: ignore[union-attr]


def test_what_fails_beside_is_named_and_may_be_mended(tmp_path: Path) -> None:
    folder = written(tmp_path, 2)
    (folder / "base.py").write_text("import layers.absent\n")
    with pytest.raises(RoundtableError, match=r"No module named 'layers\.absent' \(base\.py, line 1"):
        load_task("near.py", folder)
    (folder / "base.py").write_text("ONE = 12\n")
    assert load_task("near.py", folder).model().in_features == 24  # type: ignore[union-attr]


def test_a_pin_covers_what_a_file_imports_beside_it(tmp_path: Path) -> None:
    folder = written(tmp_path, 2)
    seen = {pin(folder)}
    for name in ("near.py", "network.py", "base.py", "layers/__init__.py", "layers/units.py"):
        (folder / name).write_text((folder / name).read_text() + "# changed\n")
        seen.add(pin(folder))
    assert len(seen) == 6
    (folder / "stranger.py").write_text("x = 1\n")
    assert pin(folder) in seen
    (folder / "near.py").write_text("name = 'network'\n__import__(name)\n")
    assert pin(folder) == blake3((folder / "near.py").read_bytes()).hexdigest()
    with pytest.raises(RoundtableError, match="No module named 'network'"):
        load_task("near.py", folder)
