"""Local algorithms: what a silo does differently from plain SGD between global and local weights.

An algorithm sees the parameters once the global weights are in them, and may give back a correction
that is applied to the gradients of every step. The other things that algorithms need exist beside it:

- Tensors that never travel (FedBN, FedPer) are a matter of the layout's rules: `train` puts the
  silo's own ones in before and hands them back after, and the agent keeps them for each job.
- Other state of a silo between rounds (SCAFFOLD's control variate, FedDyn's dual, Ditto's personal
  model) goes the same way: named tensors in `LocalUpdate.local`, kept for each (job, client).
- Extra vectors on the wire (SCAFFOLD) are further places in the layout, so that clipping, masks
  and aggregation treat them as any other part of the one vector.
- FedNova normalises by the number of local steps, which `LocalUpdate.steps` states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from roundtable.core.config import AlgorithmTable

Correction = Callable[[], None]


class LocalAlgorithm(Protocol):
    """One way to train locally."""

    def begin(self, parameters: Sequence[nn.Parameter]) -> Correction | None:
        """Called with the global weights in `parameters`.

        What it returns is called after every backward pass and changes the gradients in place;
        None where nothing has to be corrected.
        """


class FedAvg:
    """Plain local SGD (McMahan et al. 2017, Algorithm 1, ClientUpdate)."""

    def begin(self, parameters: Sequence[nn.Parameter]) -> Correction | None:
        return None


class FedProx:
    """Adds the gradient of μ/2·‖w − w_global‖² to every step's (Li et al. 2020, equation 2)."""

    def __init__(self, mu: float) -> None:
        self._mu = mu

    def begin(self, parameters: Sequence[nn.Parameter]) -> Correction | None:
        anchors = [parameter.detach().clone() for parameter in parameters]

        @torch.no_grad()
        def correct() -> None:
            drift = torch._foreach_sub(list(parameters), anchors)
            torch._foreach_add_([_gradient(p) for p in parameters], list(drift), alpha=self._mu)

        return correct


ALGORITHMS: Mapping[str, Callable[[AlgorithmTable], LocalAlgorithm]] = {
    "fedavg": lambda table: FedAvg(),
    "fedprox": lambda table: FedProx(table.mu),
}


def make_algorithm(table: AlgorithmTable) -> LocalAlgorithm:
    """The algorithm that a job's `[algorithm]` table names."""
    return ALGORITHMS[table.name](table)


def _gradient(parameter: nn.Parameter) -> Tensor:
    """The parameter's gradient, made of zeros where the loss did not reach it: the anchor still pulls."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
