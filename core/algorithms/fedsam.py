"""FedSAM: local steps by sharpness-aware minimisation (Qu et al. 2022, Algorithm 1; Foret et al. 2021)."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from roundtable.core.algorithms.contract import ClientAlgorithm, Composition
from roundtable.core.algorithms.fedavg import WHOLE_UPDATE_LEVELS
from roundtable.core.algorithms.gradient_work import Gradients, GradientWork
from roundtable.core.algorithms.table import AlgorithmTable
from roundtable.core.toml_tables import Finite

_NOTHING = 1e-36
"""Beside ‖g‖², so that a gradient of zero moves by zero; lost in the rounding of any other."""


class FedSamTable(AlgorithmTable):
    """`[algorithm]` with name = "fedsam"."""

    rho: Finite = Field(gt=0, description="radius ρ of the neighbourhood whose worst gradient is taken")


class FedSam(ClientAlgorithm):
    """The gradient at y + ρ g/‖g‖, on the same batch; the norm is over all parameters together.

    The first pass alone moves running statistics.
    """

    Table = FedSamTable
    composition = Composition(levels=WHOLE_UPDATE_LEVELS, own_optimizers=True)

    @override
    def gradients(self, work: GradientWork) -> tuple[Tensor, Gradients]:
        assert isinstance(self.table, FedSamTable)
        loss, plain = work.gradients()
        squares = [(gradient * gradient).sum() for gradient in plain if gradient is not None]
        if not squares:
            return loss, plain
        total = squares[0]
        for square in squares[1:]:
            total = total + square
        scale = torch.rsqrt(total + _NOTHING) * self.table.rho
        pairs = zip(work.weights, plain, strict=True)
        worst = [weight if gradient is None else weight + gradient * scale for weight, gradient in pairs]
        return loss, work.gradients(worst, statistics=False)[1]
