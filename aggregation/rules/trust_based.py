"""Rules that compare updates with something trusted, or with each other's past: MoNNA, FLTrust, FoolsGold."""

from __future__ import annotations

import math

import numpy as np
import torch

from roundtable.aggregation.conditions import require
from roundtable.aggregation.diagnosis import pairwise
from roundtable.aggregation.registry import RuleResult, rule
from roundtable.aggregation.rows.gram import (
    combination,
    distances_from,
    finite_gram,
    finite_norms,
    inner_products,
    without_rounding,
)
from roundtable.aggregation.rows.matrix import UpdateMatrix
from roundtable.aggregation.rules.krum import mean_of_rows
from roundtable.core.errors import AggregationError


@rule("monna", paper="Farhadkhani et al. 2023, algorithm 1", reads_all=True)
def monna(matrix: UpdateMatrix, weights: np.ndarray, *, f: int, pivot: int | str) -> RuleResult:
    """The mean of the n − f updates nearest to that of one trusted silo, itself included. Needs n > 2f.

    pivot: the silo's name in a job file, its row here. In the paper every node takes its own update.
    """
    rows = matrix.rows
    require("monna", "n > 2f (Farhadkhani et al. 2023)", rows > 2 * f, n=rows, f=f)
    if not isinstance(pivot, int) or not 0 <= pivot < rows:
        raise AggregationError(f"monna: pivot must name a silo of the round, not {pivot!r}")
    distances = without_rounding(distances_from(matrix, pivot))
    return mean_of_rows(matrix, np.argsort(distances, kind="stable")[: rows - f])


@rule("fltrust", paper="Cao et al. 2021, algorithm 2")
def fltrust(
    matrix: UpdateMatrix, weights: np.ndarray, *, root_update: torch.Tensor | None = None
) -> RuleResult:
    """Updates are scaled to the length of the server's own update on a small trusted data set, and weighed by
    their cosine with it, negative ones not at all. Sound for any number of byzantine silos.

    Raises AggregationError without a root update, for a zero one, or where no update points its way.
    """
    if root_update is None:
        raise AggregationError("fltrust needs the update of the server's own root data set in this round")
    across, own = inner_products(matrix, root_update)
    lengths = finite_norms(matrix)
    if not 0 < own < math.inf:
        raise AggregationError("fltrust: the root update is zero or not finite, it measures nothing")
    root = math.sqrt(own)
    cosine = np.divide(across, lengths * root, out=np.zeros(matrix.rows), where=lengths > 0)
    scores = np.maximum(cosine, 0.0)
    if not scores.sum() > 0:
        raise AggregationError("fltrust: no update points in the direction of the root update; trust nobody")
    scale = np.divide(root, lengths, out=np.zeros(matrix.rows), where=lengths > 0)
    share = scores / scores.sum()
    return RuleResult(combination(matrix, share * scale), share, {"trust": scores})


@rule("foolsgold", paper="Fung et al. 2020, algorithm 1", needs_gram=True)
def foolsgold(
    matrix: UpdateMatrix,
    weights: np.ndarray,
    *,
    confidence: float = 1.0,
    history: UpdateMatrix | None = None,
) -> RuleResult:
    """Weighs down updates that resemble each other: against sybils that push the same way, not against one
    attacker. The result is the mean by those weights.

    history: sums of each client's updates so far; without it only this round is compared. Cosines are over
    all parameters (the paper can restrict them to indicative ones). Raises AggregationError where all updates
    are copies.
    """
    if matrix.rows == 1:
        return mean_of_rows(matrix, np.array([0]))
    compared = history if history is not None else matrix
    if compared.rows != matrix.rows:
        raise AggregationError(f"foolsgold: history has {compared.rows} rows for {matrix.rows} updates")
    trust = foolsgold_weights(pairwise(finite_gram(compared))["cosine"], confidence)
    if not trust.sum() > 0:
        raise AggregationError("foolsgold takes all updates of the round for copies of one another")
    share = trust / trust.sum()
    return RuleResult(combination(matrix, share), share, {"trust": trust})


def foolsgold_weights(cosine: np.ndarray, confidence: float) -> np.ndarray:
    """Trust in each client, in [0, 1], from the cosines of their histories [n, n]."""
    similar = cosine - np.diag(np.full(len(cosine), np.inf))
    strongest = similar.max(axis=1)
    # Pardoning: an honest client resembles a sybil less than the sybil resembles its copies.
    ratio = np.divide(
        strongest[:, None], strongest[None, :], out=np.ones_like(cosine), where=strongest[None, :] != 0
    )
    pardoned = np.where(strongest[None, :] > strongest[:, None], similar * ratio, similar)
    np.fill_diagonal(pardoned, -np.inf)
    trust = np.clip(1 - pardoned.max(axis=1), 0.0, 1.0)
    if trust.max() > 0:
        trust = trust / trust.max()
    trust = np.minimum(trust, 0.99)
    logit = np.log(np.maximum(trust, 1e-300) / (1 - trust))
    return np.asarray(np.clip(confidence * (logit + 0.5), 0.0, 1.0))
