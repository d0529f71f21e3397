"""An optimizer that goes on from round to round, or starts afresh, as the job says."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from roundtable.client.training.batches import training_batches
from roundtable.client.training.local_training import train
from roundtable.client.training.local_work import LocalWork
from roundtable.core import ArrayTask, JobConfig, Layout, Site, Task, torch_generator
from roundtable.core.errors import TaskError


class Plain(Task):
    """SGD as the job says it."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def data(self, site: Site) -> Any:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(20, 4, generator=generator)
        return (x, x[:, :3].argmax(1)), None

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])


class Adam(Plain):
    """An optimizer with two moments and a counter."""

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.05)


class Packed(Tensor):
    """A kind of its own, which no file has a place for; torchao's 8-bit optimizers have such."""


class Counting(Plain):
    """An optimizer whose state has something beside plain tensors."""

    def __init__(self, count: Any) -> None:
        self._count = count

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        optimizer.register_step_post_hook(
            lambda opt, *rest: [opt.state[p].update(count=self._count) for p in opt.param_groups[0]["params"]]
        )
        return optimizer


def job_of(keep: str) -> JobConfig:
    algorithm = {"batch_size": 4, "learning_rate": 0.1, "momentum": 0.9, "optimizer_state": keep}
    return JobConfig.model_validate({"task": "t", "seed": 5, "algorithm": algorithm})


def rounds(task: Task, job: JobConfig) -> Tensor:
    """The weights after two rounds of a silo that is alone."""
    torch.manual_seed(0)
    model = task.model()
    layout, (data, _) = Layout.of(model), task.data(Site("alder"))
    vector, local = layout.flatten(model).clone(), None
    for round in (1, 2):
        update = train(task, task.model(), data, LocalWork(job, layout, vector, round, "alder", local))
        vector, local = vector + update.delta, update.local
    return vector


def without_a_break(task: Task, job: JobConfig) -> Tensor:
    """One loop over the batches of both rounds, with one optimizer."""
    torch.manual_seed(0)
    model = task.model()
    make = getattr(task, "optimizer", None)
    optimizer = make(model.parameters()) if make else None
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data, _ = task.data(Site("alder"))
    for round in (1, 2):
        generator = torch_generator(job.seed, round, "alder", "batches")
        for batch in training_batches(data, batch_size=4, generator=generator):
            optimizer.zero_grad()
            task.loss(model, batch.data).backward()
            optimizer.step()
    return Layout.of(model).flatten(model)


@pytest.mark.parametrize("task", [Plain(), Adam()], ids=["momentum", "adamw"])
def test_kept_state_makes_rounds_one_run_and_dropped_state_does_not(task: Task) -> None:
    whole = without_a_break(task, job_of("keep"))
    assert torch.allclose(rounds(task, job_of("keep")), whole, atol=1e-6)
    assert not torch.allclose(rounds(task, job_of("drop")), whole, atol=1e-3)


@pytest.mark.parametrize(("count", "kind"), [(1, "int"), (torch.zeros(2).as_subclass(Packed), "Packed")])
def test_state_that_is_no_plain_tensor_is_refused_with_the_remedy(count: Any, kind: str) -> None:
    with pytest.raises(TaskError, match=rf"'count' of a parameter as {kind}, .*optimizer_state = \"drop\""):
        rounds(Counting(count), job_of("keep"))


class Arrays(ArrayTask):
    """Trains with code of its own."""


def test_an_array_task_has_no_optimizer_to_keep() -> None:
    vector = torch.zeros(2)
    state = {"w": vector}
    with pytest.raises(TaskError, match="has no optimizer here"):
        train(Arrays(), state, None, LocalWork(job_of("keep"), Layout.of(state), vector, 1, "alder"))
