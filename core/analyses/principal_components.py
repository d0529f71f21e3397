"""Principal components, from the covariances of columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from typing_extensions import override

from roundtable.core.analyses.correlations import Correlation
from roundtable.core.analyses.exact_sums import Arrays
from roundtable.core.analyses.question import Answer
from roundtable.core.tables.table_description import ColumnTable


class Components(Correlation):
    """The directions in which rows differ most, over the rows in which no column is missing.

    Standardised columns have the variance 1 over all n rows (ddof = 0); variances of components are those of
    samples (ddof = 1), as scikit-learn's PCA behind its StandardScaler. The loading with the largest absolute
    value is positive.
    """

    ask: ClassVar[str] = "components"

    def __init__(
        self,
        columns: Mapping[str, ColumnTable],
        least: int,
        title: str,
        of: tuple[str, ...],
        most: int,
        standardise: bool,
    ) -> None:
        super().__init__(columns, least, title, of)
        self.most = min(most, len(of))
        self.standardise = standardise

    @override
    def answer(self, public: Arrays) -> Answer:
        base = super().answer(public)
        covariance, n = np.array(base.values["covariance"]), int(base.values["n"])
        mean = public["mean"] + self._half * public["first"] / n
        sd = np.sqrt(np.maximum(np.diag(covariance), 0.0) * (n - 1) / n)
        if self.standardise:
            told = np.diag(np.array(base.values["correlation"], dtype=object))
            constant = [name for name, value in zip(self.of, told, strict=True) if value is None]
            if constant:
                why = (
                    f"column {constant[0]!r} is constant, or spread over too little of its range, and cannot "
                    "be standardised"
                )
                return Answer(self.title, self.ask, why=why)
        scale = sd if self.standardise else np.ones(len(sd))
        variances, directions = np.linalg.eigh(covariance / np.outer(scale, scale))
        order = np.argsort(-variances, kind="stable")
        variances, loadings = np.maximum(variances[order], 0.0), directions[:, order].T
        signs = np.sign(loadings[np.arange(len(loadings)), np.abs(loadings).argmax(axis=1)])
        loadings = loadings * signs[:, None]
        shares = variances / max(float(variances.sum()), 1e-300)
        values = {
            "n": n,
            "columns": list(self.of),
            "components": loadings[: self.most].tolist(),
            "explained_variance": variances[: self.most].tolist(),
            "explained_variance_ratio": shares[: self.most].tolist(),
            "mean": mean.tolist(),
            "scale": scale.tolist(),
        }
        rows = [
            [number, float(variances[number - 1]), float(shares[number - 1]), *loadings[number - 1].tolist()]
            for number in range(1, self.most + 1)
        ]
        header = ["component", "variance", "share", *self.of]
        return Answer(self.title, self.ask, header, rows, values, notes=base.notes)
