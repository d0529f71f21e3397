"""FedSAM: local steps by sharpness-aware minimisation (Qu et al. 2022, Algorithm 1; Foret et al. 2021)."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from roundtable.core.algorithms.contract import ClientAlgorithm, Composition, GradientWork
from roundtable.core.algorithms.fedavg import WHOLE_UPDATE_LEVELS
from roundtable.core.algorithms.passes import without_statistics
from roundtable.core.algorithms.table import AlgorithmTable
from roundtable.core.toml_tables import Finite


class FedSamTable(AlgorithmTable):
    """`[algorithm]` with name = "fedsam"."""

    rho: Finite = Field(gt=0, description="radius ρ of the neighbourhood whose worst gradient is taken")


class FedSam(ClientAlgorithm):
    """The gradient at y + ρ g/‖g‖, on the same batch; the norm is over all parameters together.

    The first pass alone moves running statistics. Where the gradient is zero the second pass is left out.
    """

    Table = FedSamTable
    composition = Composition(levels=WHOLE_UPDATE_LEVELS, own_optimizers=True)

    @override
    def after_gradient(self, work: GradientWork) -> None:
        assert isinstance(self.table, FedSamTable)
        moved: list[Tensor] = [parameter for parameter in work.parameters if parameter.grad is not None]
        gradients = [parameter.grad.clone() for parameter in moved if parameter.grad is not None]
        norm = float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients])))
        if norm == 0.0:
            return
        with torch.no_grad():
            before = [parameter.clone() for parameter in moved]
            torch._foreach_add_(moved, gradients, alpha=self.table.rho / norm)
        with without_statistics(work.module):
            work.compute()
        with torch.no_grad():
            torch._foreach_copy_(moved, before)
