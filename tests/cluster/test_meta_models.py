"""Models made without memory for their weights: what is one tensor stays one, what is not saved is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cluster_models import Drawn, Knotted, Language
from torch import Tensor, nn

from roundtable.cluster.parallel.meta_init import (
    allocate,
    check_shared_memory,
    model_on_meta,
    tied_names,
)
from roundtable.cluster.parallel.shards import Places, named_tensors, read_shards
from roundtable.cluster.parallel.unsaved_constants import constants, drawn_constants
from roundtable.core import Layout, Task
from roundtable.core.errors import TaskError
from roundtable.core.layout import LayoutRules
from roundtable.core.task import initial_state

CPU = torch.device("cpu")


class Given(Task):
    """The model that a function makes."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        self._make = make

    def model(self) -> nn.Module:
        return self._make()


def test_ties_outlive_the_allocation_of_memory() -> None:
    task = Language(kind=Knotted)
    real, made = task.model(), model_on_meta(task)
    assert all(parameter.is_meta for parameter in made.parameters())
    allocate(made, CPU)
    assert tied_names(made) == tied_names(real) != []
    assert len(list(made.parameters())) == len(list(real.parameters()))


def test_buffers_stay_where_layers_run_when_parameters_wait_elsewhere() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    allocate(model, CPU, buffers=torch.device("meta"))
    assert {each.device.type for each in model.parameters()} == {"cpu"}
    assert {each.device.type for each in model.buffers()} == {"meta"}


def test_what_is_drawn_or_computed_from_weights_is_told_from_what_is_not() -> None:
    task = Language(kind=Drawn)
    real = initial_state(task, 3)
    assert isinstance(real, nn.Module)
    made = model_on_meta(task, 3)
    assert drawn_constants(task, made) == ["drawn", "lengths", "offset"]
    values = {each.name: each.value for each in constants(real)}
    assert set(values) >= {"positions", "drawn", "lengths", "offset"}
    assert torch.equal(values["positions"], dict(made.named_buffers())["positions"])


def test_a_tied_weight_is_found_under_the_name_that_a_file_has() -> None:
    task = Language(kind=Knotted)
    real = task.model()
    layout = Layout.of(real, LayoutRules(drop=("*",)))
    # Files hold a weight once, under any of its names; here under the last.
    last = {id(weight): name for name, weight in real.named_parameters(remove_duplicate=False)}
    held = {name: real.get_parameter(name).detach() for name in last.values()}
    assert len(held) < len(real.state_dict())
    made = model_on_meta(task)
    allocate(made, CPU)
    assert read_shards(named_tensors([made]), Places(layout), torch.zeros(0), held) == []
    for name, weight in real.named_parameters():
        assert torch.equal(made.get_parameter(name), weight), name


def shared_by_data() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight.data = model[0].weight.data
    return model


def shared_by_source() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    source = torch.randn(4, 4)
    model[0].weight, model[1].weight = nn.Parameter(source), nn.Parameter(source)
    return model


@pytest.mark.parametrize("make", [shared_by_data, shared_by_source])
def test_two_parameters_in_one_memory_are_refused(make: Callable[[], nn.Module]) -> None:
    layout = Layout.of(make())
    with pytest.raises(TaskError, match=r"0\.weight and 1\.weight share their memory"):
        check_shared_memory(model_on_meta(Given(make)), layout)


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("LlamaForCausalLM", {**SIZES, "vocab_size": 64, "tie_word_embeddings": True}),
        ("BertForMaskedLM", {**SIZES, "vocab_size": 64}),
        ("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64}),
    ],
)
def test_models_of_transformers_are_what_they_are_with_memory(kind: str, options: dict[str, Any]) -> None:
    library = pytest.importorskip("transformers", reason="it is not a dependency")
    model = getattr(library, kind)
    task = Given(lambda: model(model.config_class(**options)))
    made, real = model_on_meta(task), initial_state(task, 0)
    assert isinstance(real, nn.Module)
    allocate(made, CPU)
    assert tied_names(made) == tied_names(real) != []
    made.load_state_dict(real.state_dict())
    tokens = torch.arange(12).view(2, 6)

    def logits(module: nn.Module) -> Tensor:
        found: Tensor = module.eval()(tokens).logits
        return found

    assert torch.equal(logits(made), logits(real))
