"""What merging of low-rank factors is given, and what it gives."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class FactorRows:
    """Low-rank factors of one ΔW = s B A, as the clients of a round ended with them; float64.

    downs [n, rank, in] and ups [n, out, rank] of single clients, zero behind a client's own rank; shares [n]
    of the mean, of sum 1; down [rank, in] and up [out, rank] are what the round began with.
    """

    downs: Tensor
    ups: Tensor
    shares: Tensor
    down: Tensor
    up: Tensor


@dataclass(frozen=True)
class MergedFactors:
    """The factors [rank, in] and [out, rank] after a round. lost: ‖error‖² of merging, squared Frobenius norm
    of B A beside the exact product; moved: of the exact product's change in the round."""

    down: Tensor
    up: Tensor
    lost: float
    moved: float
