"""The initial model is the same wherever it is made."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from roundtable.core import ArrayTask, Task, model_digest, open_model, parse_job, save_model
from roundtable.core.errors import ConfigError, TaskError
from roundtable.core.initial_model import initial_model


class Net(Task):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


class Arrays(ArrayTask):
    def weights(self) -> dict[str, np.ndarray]:
        return {"coefficients": np.zeros((2, 3)), "intercept": np.ones(2)}


def test_same_seed_same_bytes_other_seed_other_bytes() -> None:
    job, other = parse_job('task = "net"\nseed = 1'), parse_job('task = "net"\nseed = 2')
    torch.manual_seed(0)
    first = model_digest(initial_model(job, Net()))
    torch.manual_seed(99)
    assert model_digest(initial_model(job, Net())) == first
    assert model_digest(initial_model(other, Net())) != first


def test_what_stays_local_is_carried_beside_the_vector(tmp_path: Path) -> None:
    job = parse_job('task = "net"\n[model]\nlocal = ["2.*"]')
    save_model(tmp_path / "m.safetensors", initial_model(job, Net()))
    model = open_model(tmp_path / "m.safetensors")
    assert set(model.local) == {"1.num_batches_tracked", "2.weight", "2.bias"}
    fresh = Net().model()
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh.state_dict()["2.weight"], model.local["2.weight"])


def test_arrays_travel_as_one_vector() -> None:
    model = initial_model(parse_job('task = "arrays"'), Arrays())
    assert model.vector.tolist() == [0.0] * 6 + [1.0] * 2
    assert model.state_dict()["intercept"].dtype == torch.float64


def test_a_model_of_which_nothing_travels() -> None:
    with pytest.raises(TaskError, match="no tensor of its model travels"):
        initial_model(parse_job('task = "net"\n[model]\ndrop = ["*"]'), Net())


@pytest.mark.parametrize("key", ["local", "drop"])
def test_a_pattern_that_fits_no_tensor_is_refused(key: str) -> None:
    """Otherwise a slip of the pen sends what was to stay at the silo."""
    text = f'task = "net"\n[model]\n{key} = ["2.*", "head.*"]'
    with pytest.raises(
        ConfigError, match=rf"model\.{key}: the pattern 'head\.\*' fits none of the model's 9"
    ):
        initial_model(parse_job(text), Net())


def test_a_model_that_cannot_be_made_names_the_line() -> None:
    class Broken(Task):
        def model(self) -> nn.Module:
            raise ValueError("no weights here")

    with pytest.raises(
        TaskError, match=r"ValueError: no weights here \(test_initial\.py, line \d+, in model\)"
    ):
        initial_model(parse_job('task = "broken"'), Broken())


def test_lazy_layers_are_refused_with_the_remedy() -> None:
    class Lazy(Task):
        def model(self) -> nn.Module:
            return nn.Sequential(nn.LazyLinear(3))

    with pytest.raises(TaskError, match="state their input sizes"):
        initial_model(parse_job('task = "lazy"'), Lazy())
