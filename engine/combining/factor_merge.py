"""Low-rank factors of a round merged into one pair, and what that loses.

The mean of A and the mean of B do not multiply to the mean product.

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
from roundtable.core.algorithms.contract import ServerAlgorithm
from roundtable.core.algorithms.factor_rows import FactorRows
from roundtable.core.algorithms.factors.factor_pairs import FactorPair
from roundtable.core.algorithms.factors.thin_products import side_by_side, square, stacked
from roundtable.core.errors import AggregationError
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
    places, shares = _places(rows, weights)
    if not pairs or not places:
        return {}
    error = change = 0.0
    for pair, values in _values(pairs, rows.matrix, places):
        lost, moved = _squares(pair, values, shares, model[pair.first : pair.end].double())
        error, change = error + lost, change + moved
    return _told(error, change)


def merged(
    algorithm: ServerAlgorithm,
    pairs: Sequence[FactorPair],
    rows: Rows,
    weights: Mapping[str, float],
    model: Tensor,
    vector: Tensor,
) -> Mapping[str, tuple[float, int]]:
    """Puts into the aggregate `vector` [d], at the places of each pair, what the algorithm merges out of
    single clients' factors; tells `merge_error` as the function of that name does.

    AggregationError for factors that cannot be taken apart.
    """
    places, shares = _places(rows, weights)
    error = change = 0.0
    for pair, values in _values(pairs, rows.matrix, places):
        begun = model[pair.first : pair.end].double()
        downs, ups = pair.factors(values + begun, pair.first)
        (down,), (up,) = pair.factors(begun[None], pair.first)
        try:
            found = algorithm.merge(FactorRows(downs, ups, shares, down, up))
        except RuntimeError as failure:  # LinAlgError is one.
            raise AggregationError(
                f"the factors of {pair.names[0]!r} cannot be merged: {failure}"
            ) from failure
        vector[pair.down] = (found.down - down).flatten().to(vector)
        vector[pair.up] = (found.up - up).flatten().to(vector)
        error, change = error + found.lost, change + found.moved
    return _told(error, change)


def _told(error: float, change: float) -> Mapping[str, tuple[float, int]]:
    return {MERGE_ERROR: (math.sqrt(error / change), 1)} if change > 0 else {}


def _places(rows: Rows, weights: Mapping[str, float]) -> tuple[list[int], Tensor]:
    """The rows that are in the mean, and their shares of it [n], of sum 1; none where all weigh nothing."""
    kept = [
        (place, weights[update.client])
        for place, update in enumerate(rows.updates)
        if update.client in weights
    ]
    total = math.fsum(share for _, share in kept)
    if not total > 0:
        return [], torch.zeros(0, dtype=torch.float64)
    shares = torch.tensor([share / total for _, share in kept], dtype=torch.float64)
    return [place for place, _ in kept], shares


def _squares(pair: FactorPair, values: Tensor, shares: Tensor, start: Tensor) -> tuple[float, float]:
    """‖error‖² and ‖change‖² of one pair."""
    downs, ups = pair.factors(values, pair.first)
    (down,), (up,) = pair.factors(start[None], pair.first)
    mean_down, mean_up = torch.tensordot(shares, downs, 1), torch.tensordot(shares, ups, 1)
    weighted = shares[:, None, None]
    error = square(side_by_side((ups - mean_up) * weighted), stacked(downs - mean_down))
    left = torch.cat([up, mean_up, side_by_side(ups * weighted)], 1)
    right = torch.cat([mean_down, down, stacked(downs)], 0)
    return error, square(left, right)


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
