"""Correlations and linear regression under noise, from one release of sums of products.

A row is t = (1, features), features being columns scaled to [-1, 1], and a category as 0 or 1 for each of
its values but the first. Released is Σ t_i t_j for each pair that tells something: the square of a 0 or 1 is
itself, two values of one category never go together, and of a square 1/2 is taken off, so that a row changes
it by 1/2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from roundtable.core.analyses.estimates import HEADER, coefficient_rows, coefficients
from roundtable.core.analyses.exact_sums import Arrays, Doubles
from roundtable.core.analyses.noisy.noisy_moments import in_range
from roundtable.core.analyses.noisy.noisy_question import Q95, NoisyQuestion, SumBlock, count_interval
from roundtable.core.analyses.question import Answer
from roundtable.core.errors import ConfigError
from roundtable.core.tables.table_description import ColumnTable
from roundtable.core.tables.table_reading import DataTable

DROWNED = (
    "the noise is as large as what it hides: a higher epsilon, more rows or fewer columns would leave "
    "something"
)
MOST_TERMS = 80
_CLEAR = 1.0
"""How often the noise's own spectral norm has to go into the smallest eigenvalue of the design's products:
else they may as well be singular. A stricter bound would answer where noise happens to raise that
eigenvalue, and such coefficients are off."""


class NoisyProducts(NoisyQuestion):
    """The sums of products of columns over rows in which none of them is missing."""

    def __init__(self, columns: Mapping[str, ColumnTable], title: str, of: Sequence[str]) -> None:
        super().__init__(columns, title)
        self._of = tuple(of)
        self.terms: list[str] = []
        self._source: list[tuple[str, int]] = []
        middle, half = [], []
        for name in of:
            found = self.described(name)
            if found.kind == "category":
                labels = self.category(name).labels
                self.terms += [f"{name}={label}" for label in labels[1:]]
                self._source += [(name, level) for level in range(1, len(labels))]
                middle += [0.0] * (len(labels) - 1)
                half += [1.0] * (len(labels) - 1)
            else:
                span = self.number(name)
                self.terms.append(name)
                self._source.append((name, 0))
                middle.append(span.middle)
                half.append(span.half)
        self._middle = np.array(middle)
        self._half = np.array(half)
        if len(self.terms) > MOST_TERMS:
            raise ConfigError(
                f"{title}: these columns make {len(self.terms)} terms (a category one for each value but the "
                f"first), and {MOST_TERMS} are allowed under [privacy]: the noise on their products would "
                "leave nothing of more"
            )

    @property
    @override
    def names(self) -> tuple[str, ...]:
        return self._of

    @cached_property
    def _pairs(self) -> list[tuple[int, int]]:
        """Places (i ≤ j) in t of the products that are released; (0, 0) counts rows."""
        found = [(0, 0)]
        sources = [("", 0), *self._source]
        for j in range(1, len(sources)):
            found.append((0, j))
            for i in range(1, j + 1):
                together = sources[i][0] == sources[j][0] and sources[j][1] > 0
                if not together:
                    found.append((i, j))
        return found

    @property
    def reach(self) -> float:
        """By how much a row changes the products: 1 and each feature once, their products in pairs, and
        halved squares of numbers."""
        numbers = sum(self.columns[name].kind == "number" for name in self._of)
        features = len(self._of)
        return math.sqrt(1 + features + features * (features - 1) / 2 + numbers / 4)

    @property
    @override
    def blocks(self) -> Mapping[str, SumBlock]:
        return {"products": SumBlock((len(self._pairs),), self.reach)}

    def design(self, table: DataTable, whole: npt.NDArray[np.bool_]) -> Doubles:
        """t of the whole rows, [rows, terms + 1]."""
        parts = [np.ones(int(whole.sum()))]
        for name, level in self._source:
            values = table.column(name)[whole]
            parts.append(
                (values == level).astype(np.float64) if level else in_range(values, self.columns[name])
            )
        return np.column_stack(parts)

    def products(self, t: Doubles, weight: Doubles) -> Doubles:
        """The numbers that are released of rows with these weights [rows]."""
        products = (t * weight[:, None]).T @ t
        made = np.array([products[pair] for pair in self._pairs])
        halved = np.array([i == j and i > 0 for i, j in self._pairs])
        found: Doubles = made - 0.5 * float(weight.sum()) * halved
        return found

    @override
    def added(self, table: DataTable) -> dict[str, Doubles]:
        whole = np.asarray(~np.isnan(table.matrix(self._of)).any(axis=1), dtype=np.bool_)
        t = self.design(table, whole)
        return {"products": self.products(t, np.ones(len(t)))}

    @cached_property
    def _map(self) -> Doubles:
        """What the released numbers say of each product [terms + 1, terms + 1, pairs]."""
        width = len(self.terms) + 1
        told = np.zeros((width, width, len(self._pairs)))
        for place, (i, j) in enumerate(self._pairs):
            told[i, j, place] = told[j, i, place] = 1.0
            if i == j and i > 0:
                told[i, i, 0] = 0.5
            if i == 0 and j > 0 and self._source[j - 1][1] > 0:
                told[j, j, place] = 1.0
        return told


class NoisyCorrelation(NoisyProducts):
    """Covariances and Pearson's correlations with 95 % intervals."""

    ask: ClassVar[str] = "correlation"

    @override
    def answer(self, public: Arrays) -> Answer:
        noise, released = self.spread("products", self.silos(public)), public["products"]
        n = float(released[0])
        if n < 4 * noise:
            return Answer(self.title, self.ask, why=DROWNED)
        products = self._map @ released
        mean = products[0, 1:] / n
        covariance = products[1:, 1:] / n - np.outer(mean, mean)
        likely = np.diag(covariance) > 0
        width = len(self.terms)
        found: list[list[float | None]] = [[None] * width for _ in range(width)]
        errors = [row[:] for row in found]
        intervals: list[list[list[float] | None]] = [[None] * width for _ in range(width)]
        for i in range(width):
            for j in range(width):
                if i != j and not (likely[i] and likely[j]):
                    continue
                r, error = self._correlation(products, i, j, n, noise)
                found[i][j], errors[i][j] = r, error
                intervals[i][j] = [max(-1.0, r - Q95 * error), min(1.0, r + Q95 * error)]
        values = {
            "n": n,
            "n_interval": count_interval(n, noise),
            "columns": self.terms,
            "covariance": (covariance * np.outer(self._half, self._half)).tolist(),
            "correlation": found,
            "errors": errors,
            "intervals": intervals,
        }
        rows: list[list[Any]] = []
        for i in range(width):
            for j in range(i):
                ends = intervals[i][j]
                shown = [None, None] if ends is None else ends
                rows.append([self.terms[j], self.terms[i], found[i][j], errors[i][j], *shown])
        notes = [
            f"{max(0, round(n))} ± {Q95 * noise:.4g} rows without a missing value; errors count the noise in"
        ]
        if not likely.all():
            notes.append("no correlation is told of a column whose variance the noise took below 0")
        header = ["column", "with", "correlation", "error", "95 % from", "to"]
        return Answer(self.title, self.ask, header, rows, values, notes=notes)

    def _correlation(self, products: Doubles, i: int, j: int, n: float, noise: float) -> tuple[float, float]:
        """(r, its standard error): of noise by the derivatives, of sampling as (1 − r²)/√n."""
        if i == j:
            return 1.0, 0.0
        one, two = i + 1, j + 1
        a, b = products[0, one] / n, products[0, two] / n
        va, vb = products[one, one] / n - a * a, products[two, two] / n - b * b
        root = math.sqrt(va * vb)
        r = (products[one, two] / n - a * b) / root
        # dr of the products (one, two), (0, one), (0, two), (one, one), (two, two) and of n.
        map_, half = self._map, r / 2
        d = (
            map_[one, two] / root
            + map_[0, one] * (-b / root + half * 2 * a / va)
            + map_[0, two] * (-a / root + half * 2 * b / vb)
            - map_[one, one] * half / va
            - map_[two, two] * half / vb
        )
        by_n = -(products[one, two] / n - 2 * a * b) / root
        by_n += half * ((products[one, one] / n - 2 * a * a) / va + (products[two, two] / n - 2 * b * b) / vb)
        d = (d + map_[0, 0] * by_n) / n
        r = min(max(r, -1.0), 1.0)
        return r, math.sqrt(noise**2 * float(d @ d) + (1 - r * r) ** 2 / n)


class NoisyLinear(NoisyProducts):
    """Ordinary least squares with an intercept, on noisy sufficient statistics; errors count the noise in.

    With A and c the noisy sums of products, b solves A b = c; c − A b has the variance of the residuals, s²
    A, and of the noise in A and c, and b that of A⁻¹ (c − A b).
    """

    ask: ClassVar[str] = "linear"

    def __init__(
        self, columns: Mapping[str, ColumnTable], title: str, outcome: str, on: tuple[str, ...]
    ) -> None:
        super().__init__(columns, title, (*on, outcome))
        self._outcome = outcome
        self.number(outcome)

    @property
    @override
    def told(self) -> tuple[str, ...]:
        return (self._outcome,)

    @override
    def answer(self, public: Arrays) -> Answer:
        noise, released = self.spread("products", self.silos(public)), public["products"]
        n, told = float(released[0]), self._map
        products = told @ released
        a, c, yy = products[:-1, :-1], products[:-1, -1], float(products[-1, -1])
        least = float(np.linalg.eigvalsh(a)[0])
        if least < _CLEAR * noise * math.sqrt(len(a)):
            return Answer(self.title, self.ask, why=DROWNED)
        b = np.linalg.solve(a, c)
        freedom = max(n - len(b), 1.0)
        # Where noise takes it below 0, nothing is known of it but that it is small beside the noise.
        scale = max(float(yy - 2 * b @ c + b @ a @ b) / freedom, 0.0)
        by_noise = np.einsum("ijk,j->ik", told[:-1, :], np.append(-b, 1.0)) * noise
        middle = scale * a + by_noise @ by_noise.T
        covariance = np.linalg.solve(a, np.linalg.solve(a, middle).T)
        half, centre = self._half, self._middle
        units = np.diag([half[-1], *(half[-1] / half[:-1])])
        units[0, 1:] = -half[-1] * centre[:-1] / half[:-1]
        estimates = units @ b
        estimates[0] += centre[-1]
        errors = np.sqrt(np.diag(units @ covariance @ units.T))
        total = yy - products[0, -1] ** 2 / n
        explained = min(max(1 - scale * freedom / total, 0.0), 1.0) if total > 0 else None
        values = {
            "n": n,
            "n_interval": count_interval(n, noise),
            **coefficients(["intercept", *self.terms[:-1]], estimates, errors, None),
            "scale": scale * half[-1] ** 2,
            "r_squared": explained,
        }
        notes = [
            f"{max(0, round(n))} ± {Q95 * noise:.4g} rows, residual standard deviation "
            f"{math.sqrt(scale) * half[-1]:.5g}; errors, intervals and p count the noise in"
        ]
        if not scale > 0:
            notes.append("the noise took the variance of residuals below 0: it counts as 0 beside the noise")
        return Answer(self.title, self.ask, HEADER, coefficient_rows(values), values, notes=notes)
