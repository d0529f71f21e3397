"""An optimizer's state from one round to the next, as tensors that stay at the silo."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from roundtable.core.errors import TaskError

_PREFIX = "optimizer/"


def state_tensors(optimizer: Any, module: nn.Module) -> dict[str, Tensor]:
    """Copies, on CPU, of the state of every parameter, under `optimizer/<parameter>/<what>`.

    Raises TaskError for an optimizer that keeps something else than tensors, or tensors of a kind of its own,
    as torchao's 8-bit ones do: a file has no place for these.
    """
    found = {}
    for name, parameter in module.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is None:
                continue
            if type(value) not in (Tensor, nn.Parameter):
                raise TaskError(
                    f"{type(optimizer).__name__} keeps {key!r} of a parameter as {type(value).__name__}, and "
                    'only plain tensors go from round to round: set [algorithm] optimizer_state = "drop"'
                )
            found[f"{_PREFIX}{name}/{key}"] = value.detach().to("cpu", copy=True)
    return found


def restore_state(optimizer: Any, module: nn.Module, kept: Mapping[str, Tensor]) -> None:
    """Puts the state in that an earlier round left; a parameter of which nothing is kept starts afresh."""
    states: dict[nn.Parameter, dict[str, Tensor]] = {}
    parameters = dict(module.named_parameters())
    for path, value in kept.items():
        name, _, key = path.removeprefix(_PREFIX).rpartition("/")
        if path.startswith(_PREFIX) and name in parameters:
            states.setdefault(parameters[name], {})[key] = value
    if isinstance(optimizer, torch.optim.Optimizer):
        document = optimizer.state_dict()
        order = [p for group in optimizer.param_groups for p in group["params"]]
        document["state"] = {i: states[p] for i, p in enumerate(order) if p in states}
        optimizer.load_state_dict(document)
        return
    for parameter, values in states.items():
        placed = {key: value.to(parameter.device, copy=True) for key, value in values.items()}
        optimizer.state[parameter] = placed
