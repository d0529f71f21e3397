"""Imports every module that holds rules, so that the registry knows them all."""

from roundtable.aggregation import central, coordinate, groups, krum, mean, spectral, subsets, trust

__all__ = ["central", "coordinate", "groups", "krum", "mean", "spectral", "subsets", "trust"]
