"""Mixed precision: losses and gradients in bfloat16 where that is safe, weights and steps in float32."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from roundtable.client.batch_tensors import give_float32
from roundtable.core.errors import ConfigError
from roundtable.core.privacy_table import ExampleLevel
from roundtable.core.task import AnyTask, ArrayTask, Task, told
from roundtable.simulation.backend import World


class MixedPrecision(Task):
    """A task whose model runs under torch's autocast to bfloat16; nothing else of it differs."""

    def __init__(self, task: Task, device: torch.device) -> None:
        self._task = task
        self._kind = device.type

    @override
    def model(self) -> nn.Module:
        """The task's own."""
        return self._task.model()

    @override
    def data(self, site: Any) -> Any:
        """The task's own."""
        return self._task.data(site)

    @override
    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer | None:
        """The task's own, where it has one."""
        make = getattr(self._task, "optimizer", None)
        return None if make is None else make(parameters)

    @override
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The task's loss of what the model gives, as float32."""
        whole = give_float32(model)
        try:
            with torch.autocast(self._kind, dtype=torch.bfloat16):
                loss: Any = self._task.loss(model, batch)
        finally:
            whole.remove()
        return loss.float() if isinstance(loss, Tensor) else loss


def mixed(world: World) -> bool:
    """Whether clients train in mixed precision. Raises ConfigError where that is impossible."""
    if world.job.simulation.precision == "float32":
        return False
    if told(world.task):
        raise ConfigError(
            f'simulation.precision = "bf16": {type(world.task).__name__} asks for a context, which is not '
            'handed through the mixed precision of its loss; set simulation.precision = "float32"'
        )
    if isinstance(world.task, ArrayTask):
        raise ConfigError(
            'simulation.precision = "bf16": an ArrayTask trains with code of its own; '
            'choose the precision there, and "float32" here'
        )
    if isinstance(world.job.privacy, ExampleLevel):
        raise ConfigError(
            'simulation.precision = "bf16": privacy.level = "example" clips the gradient of each example, '
            'which is computed in float32 alone; set simulation.precision = "float32"'
        )
    return True


@cache
def lstm_in_bfloat16() -> bool:
    """Whether torch has an LSTM in bfloat16 for this processor: oneDNN has none without AVX-512."""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            nn.LSTM(4, 4)(torch.zeros(2, 1, 4))
    except RuntimeError:
        return False
    return True


def trained_task(world: World, device: torch.device) -> AnyTask:
    """The task as clients train it. ConfigError for an LSTM where the processor has none in bfloat16."""
    if not mixed(world):
        return world.task
    assert not isinstance(world.task, ArrayTask)
    lacks = device.type == "cpu" and not lstm_in_bfloat16()
    if lacks and any(isinstance(layer, nn.LSTM) for layer in world.task.model().modules()):
        raise ConfigError(
            'simulation.precision = "bf16": this processor has no LSTM in bfloat16 (AVX-512 is needed); '
            'set simulation.precision = "float32"'
        )
    return MixedPrecision(world.task, device)
