"""SCAFFOLD as FLamby runs it: model and control variate are means over examples."""

from dataclasses import replace

from roundtable.core.algorithms.scaffold import Scaffold
from roundtable.core.algorithms.table import AlgorithmTable


class WeightedScaffold(Scaffold):
    """With all clients in every round c ← c + Σ π_i (c_i⁺ − c_i), π_i the share of the examples, is exact."""

    def __init__(self, table: AlgorithmTable) -> None:
        super().__init__(table)
        self.composition = replace(self.composition, weightings=frozenset({"examples"}))
