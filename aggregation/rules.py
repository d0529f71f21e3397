"""Imports every module that holds rules, so that the registry knows them all."""

from roundtable.aggregation import coordinate, mean

__all__ = ["coordinate", "mean"]
