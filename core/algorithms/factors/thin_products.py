"""Products of a tall and a wide matrix, [out, k] and [k, in], that are never written out."""

from __future__ import annotations

import torch
from torch import Tensor


def side_by_side(factors: Tensor) -> Tensor:
    """[n, out, rank] → [out, n · rank]."""
    return factors.permute(1, 0, 2).flatten(1)


def stacked(factors: Tensor) -> Tensor:
    """[n, rank, in] → [n · rank, in]."""
    return factors.flatten(0, 1)


def square(left: Tensor, right: Tensor) -> float:
    """‖left · right‖² of [out, k] and [k, in]."""
    # By triangles of at most k rows, since a sum of the products of Gram matrices would cancel.
    core = torch.linalg.qr(left, "r").R @ torch.linalg.qr(right.T, "r").R.T
    return float(core.square().sum())


def truncated(left: Tensor, right: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """(Vᵀ [rank, in], U Σ [out, rank]) of the best product of this rank (Eckart & Young 1936), zeros behind
    what the matrix's sides allow.

    The SVD is of the core between two QR decompositions, k × k. The largest entry of each left vector is
    positive, so that the same product gives the same factors.
    """
    tall, wide = torch.linalg.qr(left), torch.linalg.qr(right.T)
    u, values, vt = torch.linalg.svd(tall.R @ wide.R.T, full_matrices=False)
    kept = min(rank, len(values))
    u, vt = tall.Q @ u[:, :kept], vt[:kept] @ wide.Q.T
    largest = u.gather(0, u.abs().argmax(0, keepdim=True))
    signs = torch.where(largest < 0, -1.0, 1.0).to(u)
    down, up = right.new_zeros(rank, right.shape[1]), left.new_zeros(left.shape[0], rank)
    down[:kept] = vt * signs.T
    up[:, :kept] = u * signs * values[:kept]
    return down, up
