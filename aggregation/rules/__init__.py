"""The rules that make one vector of the rows of a round; importing this registers all of them."""

from roundtable.aggregation.rules import (
    central,
    coordinate,
    group_rule,
    krum,
    mean,
    spectral,
    subsets,
    trust_based,
)

__all__ = ["central", "coordinate", "group_rule", "krum", "mean", "spectral", "subsets", "trust_based"]
