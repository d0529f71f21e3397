"""What a weighted rule weighs each client's update by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from roundtable.aggregation.validation import ClientRow, Exclusion
from roundtable.core.errors import AggregationError

Weighting = Literal["examples", "uniform", "inverse_loss", "custom"]

LOSS_FLOOR = 0.1
"""ε of inverse-loss weighting, as a share of the round's median loss."""


def row_weights(
    clients: Sequence[ClientRow], weighting: Weighting, custom: Mapping[str, float]
) -> np.ndarray:
    """Weight of each client's row, float64 [n]; `custom` maps names to weights.

    Raises AggregationError where `custom` lacks a client.
    """
    if weighting == "examples":
        return np.array([client.examples for client in clients], dtype=np.float64)
    if weighting == "uniform":
        return np.ones(len(clients))
    if weighting == "inverse_loss":
        return inverse_loss_weights(np.array([client.loss for client in clients], dtype=np.float64))
    missing = [client.name for client in clients if client.name not in custom]
    if missing:
        raise AggregationError(f"no custom weight for {', '.join(missing)}: add them under weights")
    return np.array([custom[client.name] for client in clients], dtype=np.float64)


def capped(counts: np.ndarray, ratio: float) -> np.ndarray:
    """Example counts [n] of at most `ratio` times their lower median, float64 [n].

    Of an even number the lower of the two in the middle counts: half of the silos cannot raise their own cap.
    """
    middle = float(np.sort(counts)[(len(counts) - 1) // 2])
    return np.minimum(np.asarray(counts, dtype=np.float64), ratio * middle)


def capped_clients(
    clients: Sequence[ClientRow], weights: np.ndarray, ratio: float
) -> tuple[np.ndarray, tuple[Exclusion, ...]]:
    """The weights [n] with the cap, and those whom it lowers, with the sentence for the round's record."""
    lowered = capped(weights, ratio)
    notes = [
        Exclusion(
            client.name,
            "weight",
            f"{client.examples} examples count as {after:.6g}, {ratio:g} times the median of the cohort "
            '(aggregation.validation.weight_ratio; "off" turns this off)',
        )
        for client, before, after in zip(clients, weights, lowered, strict=True)
        if after < before
    ]
    return lowered, tuple(notes)


def inverse_loss_weights(losses: np.ndarray) -> np.ndarray:
    """1 / (loss + ε) for losses of at least 0, [n] → [n]; all equal where more than half of them are 0.

    ε is `LOSS_FLOOR` times the median loss, so that the weights follow the losses' scale and a client that
    reports a loss of 0 counts at most 1 + 1 / LOSS_FLOOR = 11 times as much as one with the median loss.
    """
    middle = float(np.median(losses))
    if middle == 0:
        return np.ones(len(losses))
    # Relative to the median: neither tiny nor huge losses overflow.
    return np.asarray(1 / (losses / middle + LOSS_FLOOR))
