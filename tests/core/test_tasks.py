"""Finding a task, and saying why it cannot be found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from roundtable.core import ArrayTask, Site, Task, initial_state, load_task
from roundtable.core.errors import ConfigError, TaskError
from roundtable.core.task import lacks

DIGITS = """
import roundtable.core as core
from torch import nn

class Digits(core.Task):
    def model(self): return nn.Linear(2, 2)
    def data(self, site): return (), None
    def loss(self, model, batch): return model(batch).mean()
"""
PLAIN = """
from torch import nn
def model(): return nn.Linear(2, 2)
def data(site): return (), None
def loss(model, batch): return model(batch).mean()
import sys
here = sys.modules[__name__]
"""


def write(folder: Path, text: str, name: str = "digits.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize("reference", ["digits", "digits.py", "digits.py:Digits"])
def test_a_file_beside_the_job(tmp_path: Path, reference: str) -> None:
    write(tmp_path, DIGITS)
    assert type(load_task(reference, tmp_path)).__name__ == "Digits"


def test_plain_functions_on_any_object(tmp_path: Path) -> None:
    write(tmp_path, PLAIN)
    assert isinstance(load_task("digits.py:here", tmp_path).model(), nn.Linear)  # type: ignore[union-attr]


def test_a_module_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, DIGITS, "my_unusual_task.py")
    monkeypatch.syspath_prepend(tmp_path)
    assert type(load_task("my_unusual_task:Digits")).__name__ == "Digits"


def test_an_installed_entry_point_wins_over_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, DIGITS, "installed_task.py")
    write(tmp_path, "raise RuntimeError('the file was used')", "digits.py")
    info = tmp_path / "other-1.0.dist-info"
    info.mkdir()
    write(info, "Metadata-Version: 2.1\nName: other\nVersion: 1.0\n", "METADATA")
    write(info, "[roundtable.tasks]\ndigits = installed_task:Digits\n", "entry_points.txt")
    monkeypatch.syspath_prepend(tmp_path)
    assert type(load_task("digits", tmp_path)).__module__ == "installed_task"


def test_the_same_file_is_loaded_once_under_one_name_everywhere(tmp_path: Path) -> None:
    write(tmp_path, DIGITS)
    first, again = load_task("digits", tmp_path), load_task("digits.py:Digits", tmp_path)
    assert type(first) is type(again)
    code = (
        "import sys; from pathlib import Path; from roundtable.core import load_task;"
        "print(type(load_task('digits', Path(sys.argv[1]))).__module__)"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == type(first).__module__


@pytest.mark.parametrize(
    ("text", "reference", "message"),
    [
        (DIGITS, "digtis", r"'digtis' not found: no entry point .* and there is no .*digtis\.py"),
        (DIGITS, "digtis.py:Digits", r"there is no file .*digtis\.py"),
        (DIGITS, "digits.py:Digtis", "has no 'Digtis'"),
        (DIGITS, "no_such_module:Digits", "importing 'no_such_module' failed: ModuleNotFoundError"),
        (DIGITS, ":Digits", "importing '' failed"),
        (
            "import no_such_library",
            "digits",
            "failed: ModuleNotFoundError: No module named 'no_such_library'",
        ),
        ("def broken(:", "digits", "failed: SyntaxError"),
        ("raise SystemExit(3)", "digits", "failed: SystemExit: 3"),
        ("x = 1", "digits", r"must hold exactly one Task \(found: none\)"),
        (DIGITS + "class Other(Digits): pass", "digits", r"\(found: Digits, Other\)"),
        (
            DIGITS + "class Other(Digits):\n    def __init__(self): 1 / 0",
            "digits.py:Other",
            "creating it failed: Zero",
        ),
        (PLAIN.replace("def loss", "def lost"), "digits.py:here", "has no loss"),
        (
            "import roundtable.core as core\nclass Empty(core.Task): pass",
            "digits",
            "Empty has no model, data, loss",
        ),
        (
            "import roundtable.core as core\nclass Empty(core.ArrayTask):\n    def fit(self): pass",
            "digits",
            "Empty has no weights, data",
        ),
    ],
)
def test_mistakes(tmp_path: Path, text: str, reference: str, message: str) -> None:
    write(tmp_path, text)
    with pytest.raises(TaskError, match=message):
        load_task(reference, tmp_path)


SIZED = """
import roundtable.core as core
from torch import nn

class Sized(core.Task):
    def __init__(self, hidden: int, rate: float = 0.5, *, name: str = "x"):
        self.hidden, self.rate = hidden, rate
    def model(self): return nn.Linear(2, self.hidden)
    def data(self, site): return (), None
    def loss(self, model, batch): return model(batch).mean()

def deep(layers: int): return Sized(2 * layers)
made = Sized(3)
"""


def test_parameters_reach_the_class_or_the_function_that_makes_the_task(tmp_path: Path) -> None:
    write(tmp_path, SIZED)
    task: Any = load_task("digits.py:Sized", tmp_path, parameters={"hidden": 7, "rate": 1})
    assert (task.hidden, task.rate) == (7, 1)
    assert load_task("digits.py:deep", tmp_path, parameters={"layers": 2}).hidden == 4  # type: ignore[union-attr]
    assert load_task("digits.py:made", tmp_path).hidden == 3  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("reference", "parameters", "message", "key"),
    [
        ("Sized", {}, "needs the parameter 'hidden'", ()),
        ("Sized", {"hidden": "7"}, "hidden must be of type int, not '7'", ("hidden",)),
        ("Sized", {"hidden": True}, "hidden must be of type int, not True", ("hidden",)),
        ("Sized", {"hiden": 7}, "has no parameter 'hiden'; it takes: hidden, rate, name", ("hiden",)),
        ("deep", {"hidden": 7}, r"line \d+\) has no parameter 'hidden'; it takes: layers", ("hidden",)),
        ("made", {"hidden": 7}, "an object that is made already", ("hidden",)),
    ],
)
def test_parameters_that_do_not_fit(
    tmp_path: Path, reference: str, parameters: dict[str, Any], message: str, key: tuple[str, ...]
) -> None:
    write(tmp_path, SIZED)
    with pytest.raises(ConfigError, match=message) as raised:
        load_task(f"digits.py:{reference}", tmp_path, parameters=parameters)
    assert raised.value.key == ("task", *key)


def test_a_file_that_failed_can_be_mended(tmp_path: Path) -> None:
    write(tmp_path, "raise RuntimeError('not yet')")
    with pytest.raises(TaskError, match="not yet"):
        load_task("digits", tmp_path)
    write(tmp_path, DIGITS + "# a longer file, so that no stale byte code fits it")
    assert type(load_task("digits", tmp_path)).__name__ == "Digits"


class Net(Task):
    def model(self) -> nn.Module:
        return nn.Linear(3, 2)


class Arrays(ArrayTask):
    def weights(self) -> dict[str, np.ndarray]:
        return {"w": np.ones((2, 2)), "b": np.float32(3.0), "n": np.arange(2)}


def test_initial_weights_follow_the_seed_and_nothing_else() -> None:
    torch.manual_seed(1)
    first = initial_state(Net(), 5)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second, other = initial_state(Net(), 5), initial_state(Net(), 6)
    assert torch.equal(torch.get_rng_state(), state)
    assert isinstance(first, nn.Linear)
    assert isinstance(second, nn.Linear)
    assert isinstance(other, nn.Linear)
    assert torch.equal(first.weight, second.weight)
    assert not torch.equal(first.weight, other.weight)


def test_arrays_become_tensors_of_their_shape_and_dtype() -> None:
    state = initial_state(Arrays(), 0)
    assert isinstance(state, dict)
    assert {name: (tuple(t.shape), t.dtype) for name, t in state.items()} == {
        "w": ((2, 2), torch.float64),
        "b": ((), torch.float32),
        "n": ((2,), torch.int64),
    }


def test_a_model_that_is_none() -> None:
    class Wrong(Task):
        def model(self) -> nn.Module:
            return {"w": torch.zeros(1)}  # type: ignore[return-value]

    with pytest.raises(TaskError, match=r"Wrong\.model\(\) returned a dict, not a torch\.nn\.Module"):
        initial_state(Wrong(), 0)


def test_arrays_that_torch_cannot_hold() -> None:
    class Wrong(ArrayTask):
        def weights(self) -> dict[str, np.ndarray]:
            return {"w": np.array(["a", "b"])}

    with pytest.raises(TaskError, match=r"Wrong\.weights\(\): 'w' has dtype <U1"):
        initial_state(Wrong(), 0)


def test_a_silo_has_all_of_its_data_and_a_simulated_client_its_share() -> None:
    labels = torch.tensor([0, 1, 0, 1])
    assert Site("north").shard(labels).tolist() == [0, 1, 2, 3]
    simulated = Site(
        "c1", 1, 2, partition=lambda values, index, count: np.flatnonzero(values % count == index)
    )
    assert simulated.shard(labels).tolist() == [1, 3]


def test_a_task_with_nothing_but_its_model_is_enough_where_it_need_not_train(tmp_path: Path) -> None:
    (tmp_path / "digits.py").write_text(
        "import roundtable.core as core\nclass Bare(core.Task):\n    def model(self): return None"
    )
    with pytest.raises(TaskError, match="Bare has no data, loss"):
        load_task("digits", tmp_path)
    assert lacks(load_task("digits", tmp_path, trains=False)) == ["data", "loss"]
    (tmp_path / "empty.py").write_text("import roundtable.core as core\nclass Empty(core.Task): pass")
    with pytest.raises(TaskError, match=r"Empty has no model$"):
        load_task("empty", tmp_path, trains=False)
