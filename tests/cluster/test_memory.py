"""The estimate against what torch's memory tracker counts in a step of fake tensors."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from cluster_models import Language
from cluster_plans import plan
from torch import nn
from tracked import allocated

from roundtable.cluster.choice.machine_rates import rates_of
from roundtable.cluster.choice.step_time import step_time
from roundtable.cluster.choice.unit_sums import UnitSums
from roundtable.cluster.parallel.strategy import Mesh, Strategy
from roundtable.cluster.plan.memory_estimate import ModelProbe, estimate
from roundtable.cluster.plan.model_probe import probe_model
from roundtable.cluster.plan.resources import Resources
from roundtable.cluster.stepping.offloaded_activations import OffloadedActivations
from roundtable.core.errors import ConfigError
from roundtable.core.task import Site

MODELS: dict[str, dict[str, Any]] = {
    "deep": {"dim": 256, "layers": 6, "heads": 4, "hidden": 1024, "vocabulary": 2000, "length": 128},
    "wide": {"dim": 1024, "layers": 2, "heads": 16, "hidden": 4096, "vocabulary": 1000, "length": 128},
    "many words": {"dim": 256, "layers": 2, "heads": 4, "hidden": 1024, "vocabulary": 32000, "length": 512},
}
MESHES = {
    "one": plan(micro=4),
    "one checkpointed": plan(micro=4, checkpointing="every"),
    "zero2": plan("zero2", micro=4, fsdp=8),
    "zero3": plan("zero3", micro=4, fsdp=8),
    "hsdp": plan("zero3", micro=4, dp=2, fsdp=4),
    "zero3 checkpointed": plan("zero3", micro=4, fsdp=8, checkpointing="every"),
    "tp": plan(micro=4, tp=4),
    "tp sequence": plan(micro=4, tp=4, sequence_parallel=True),
    "selective": plan("zero3", micro=4, fsdp=8, checkpointing="selective"),
}


class WithAdam(Language):
    """Two states for each parameter."""

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters)


@cache
def looked_over(name: str) -> tuple[WithAdam, ModelProbe]:
    task = WithAdam(examples=8, **MODELS[name])
    data, _ = task.data(Site("silo"))
    # The tracker's collectives do nothing, and so copy nothing.
    return task, replace(probe_model(task, data, device="cpu"), gloo=False)


def ratio(name: str, strategy: Strategy, micro_batches: int = 1) -> float:
    task, found = looked_over(name)
    real = allocated(task, strategy, found, micro_batches)["Total"]
    return estimate(found, strategy, micro_batches).peak / real


def test_the_estimate_is_near() -> None:
    assert 0.85 < ratio("deep", MESHES["zero3"]) < 1.15


# What is computed again and the copies that a reduction makes are counted as if they met, which ranks over
# gloo do (0.94 of what they allocate here) and the tracker's do not: it shows with two blocks of 64 MiB.
CAREFUL = {("wide", "zero3 checkpointed"): 1.2, ("wide", "selective"): 1.2}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_the_estimate_is_near_over_a_grid(name: str, mesh: str) -> None:
    assert 0.85 < ratio(name, MESHES[mesh]) < CAREFUL.get((name, mesh), 1.15)


@pytest.mark.slow
def test_gradients_that_are_accumulated_are_counted() -> None:
    assert 0.85 < ratio("deep", MESHES["one"], 2) < 1.15


def test_activations_that_wait_in_the_hosts_memory_are_counted_there() -> None:
    _, probe = looked_over("deep")
    strategy, resources = plan("ddp", micro=4, dp=2), Resources(1, 2, 1 << 34, "cuda")
    away, rates = replace(strategy, offload_activations=True), rates_of(resources, "float32")
    needed, less = (estimate(probe, each, 1) for each in (strategy, away))
    assert less.host == pytest.approx(needed.activations, rel=0.01)
    assert needed.peak - less.peak > 0.3 * needed.activations
    times = [step_time(probe, UnitSums(probe), each, 8, rates, resources) for each in (strategy, away)]
    assert times[0].offload == 0.0
    assert times[1].offload == pytest.approx(2 * less.host / rates.host, rel=0.01)
    for more in ({"checkpointing": "every"}, {"mesh": Mesh(pp=2), "data_parallel": "none"}):
        with pytest.raises(ConfigError, match="offload_activations = true and"):
            replace(away, **more)


def test_what_a_forward_pass_keeps_waits_elsewhere_and_weights_stay() -> None:
    torch.manual_seed(1)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh()), torch.randn(32, 64)
    model(x).square().mean().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    offloading = OffloadedActivations(pinned=False)
    with offloading:
        loss = model(x).square().mean()
    loss.backward()
    # The linear layer's input, and what the last layer gives, for it and for the square.
    assert offloading.moved == 3 * x.nbytes
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))
