"""SCAFFOLD as FLamby runs it: model and control variate are means over examples."""

from dataclasses import replace

from roundtable.core.algorithms.scaffold import Scaffold


class WeightedScaffold(Scaffold):
    """With all clients in every round c ← c + Σ π_i (c_i⁺ − c_i), π_i the share of the examples, is exact."""

    composition = replace(Scaffold.composition, weightings=frozenset({"examples"}))
