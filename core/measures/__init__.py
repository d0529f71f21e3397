"""Metrics that are no mean over examples, as `rt.metrics`."""

from roundtable.core.measures.measured import (
    auroc,
    calibration,
    concordance,
    confusion,
    correlation,
    perplexity,
    quantiles,
    regression,
)

__all__ = [
    "auroc",
    "calibration",
    "concordance",
    "confusion",
    "correlation",
    "perplexity",
    "quantiles",
    "regression",
]
