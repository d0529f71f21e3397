"""What averaging low-rank factors loses: the mean of A and the mean of B do not multiply to the mean product.

A pair of factors is ΔW = s B A with A [rank, in] and B [out, rank] (Hu et al. 2022, equation 3). With weights
p_k of sum 1 and changes a_k, b_k of the factors from those that the round began with, ā and b̄ their means,

    error    Σ p_k B_k A_k − B̄ Ā = Σ p_k (b_k − b̄)(a_k − ā)
    change   Σ p_k B_k A_k − B A = B ā + b̄ A + Σ p_k b_k a_k

The scale s, one for all pairs of a model, leaves their ratio alone. Both are sums of few thin products, whose
norm follows from products of the thin matrices: no matrix [out, in] is made.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from roundtable.aggregation import UpdateMatrix
from roundtable.core.foundation.factor_pairs import FactorPair
from roundtable.engine.combining.received import Rows

MERGE_ERROR = "merge_error"
"""The metric's name among a round's training metrics."""


def merge_error(
    pairs: Sequence[FactorPair], rows: Rows, weights: Mapping[str, float], model: Tensor
) -> Mapping[str, tuple[float, int]]:
    """`merge_error`: ‖error‖ as a share of ‖change‖, Frobenius norms over all pairs, as (value, 1).

    `weights` are the shares of the clients in the mean, `model` [d] is what all of them began from. Empty
    where there are no pairs, or nothing changed.
    """
    kept = [
        (place, weights[update.client])
        for place, update in enumerate(rows.updates)
        if update.client in weights
    ]
    total = math.fsum(share for _, share in kept)
    if not pairs or not total > 0:
        return {}
    places = [place for place, _ in kept]
    shares = torch.tensor([share / total for _, share in kept], dtype=torch.float64)
    error = change = 0.0
    for pair, values in _values(pairs, rows.matrix, places):
        lost, moved = _squares(pair, values, shares, model[pair.first : pair.end].double())
        error, change = error + lost, change + moved
    return {MERGE_ERROR: (math.sqrt(error / change), 1)} if change > 0 else {}


def _squares(pair: FactorPair, values: Tensor, shares: Tensor, start: Tensor) -> tuple[float, float]:
    """‖error‖² and ‖change‖² of one pair."""
    downs, ups = pair.factors(values, pair.first)
    (down,), (up,) = pair.factors(start[None], pair.first)
    mean_down, mean_up = torch.tensordot(shares, downs, 1), torch.tensordot(shares, ups, 1)
    weighted = shares[:, None, None]
    error = _square(_side_by_side((ups - mean_up) * weighted), _stacked(downs - mean_down))
    left = torch.cat([up, mean_up, _side_by_side(ups * weighted)], 1)
    right = torch.cat([mean_down, down, _stacked(downs)], 0)
    return error, _square(left, right)


def _side_by_side(factors: Tensor) -> Tensor:
    """[n, out, rank] → [out, n · rank]."""
    return factors.permute(1, 0, 2).flatten(1)


def _stacked(factors: Tensor) -> Tensor:
    """[n, rank, in] → [n · rank, in]."""
    return factors.flatten(0, 1)


def _square(left: Tensor, right: Tensor) -> float:
    """‖left · right‖² of [out, k] and [k, in]."""
    # By triangles of at most k rows, since a sum of the products of Gram matrices would cancel.
    core = torch.linalg.qr(left, "r").R @ torch.linalg.qr(right.T, "r").R.T
    return float(core.square().sum())


def _values(
    pairs: Sequence[FactorPair], matrix: UpdateMatrix, places: Sequence[int]
) -> Iterator[tuple[FactorPair, Tensor]]:
    """Each pair with its columns of these rows, float64 [n, end − first], in one pass over the matrix."""
    waiting, begun = list(pairs), list[tuple[FactorPair, Tensor]]()
    for start, stop, block in matrix.blocks():
        while waiting and waiting[0].first < stop:
            pair = waiting.pop(0)
            begun.append((pair, torch.empty(len(places), pair.end - pair.first, dtype=torch.float64)))
        for pair, values in begun:
            begin, end = max(start, pair.first), min(stop, pair.end)
            here = block[places, begin - start : end - start]
            values[:, begin - pair.first : end - pair.first] = here.double().cpu()
        yield from ((pair, values) for pair, values in begun if pair.end <= stop)
        begun = [each for each in begun if each[0].end > stop]
