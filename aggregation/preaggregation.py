"""Steps in front of a rule, in any number and order: clipping, ARC, nearest-neighbour mixing, bucketing.

Each returns a mixing matrix [m, n]: row i of its output is a linear combination of the n updates. So a step
needs norms or the Gram matrix, never a copy of the updates. Steps of others come as rules do, from a file
beside the job or through the entry-point group `roundtable.pre_aggregations`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from roundtable.aggregation.conditions import require, require_positive
from roundtable.aggregation.registry import ARGUMENTS, PROVIDED
from roundtable.aggregation.rows.gram import finite_gram, finite_norms, squared_distances, without_rounding
from roundtable.aggregation.rows.matrix import UpdateMatrix
from roundtable.core.errors import AggregationError
from roundtable.core.plugins.calls import as_function, check_call, check_parameters, named_at
from roundtable.core.plugins.doors import resolve
from roundtable.core.seeds import numpy_generator

ENTRY_POINT_GROUP = "roundtable.pre_aggregations"


@dataclass(frozen=True)
class PreAggregation:
    """A step as the pipeline knows it. scales_only: rows stay one per client and keep their weights."""

    name: str
    function: Callable[..., np.ndarray]
    needs_gram: bool = False
    scales_only: bool = False

    def check(self, parameters: Mapping[str, object]) -> None:
        """Raises ConfigError for parameters that the step does not have, or lacks; f may be the rule's."""
        assumed = {"f": 0, **parameters} if self.takes("f") else parameters
        owner = f"pre-aggregation {self.name!r}"
        check_parameters(
            owner,
            self.function,
            assumed,
            skip=len(ARGUMENTS),
            table=("aggregation", "pre"),
            provided=PROVIDED,
        )
        f = assumed.get("f", 0)
        if isinstance(f, int) and f < 0:
            raise AggregationError(f"{owner}: f counts byzantine silos and cannot be {f}")

    def takes(self, parameter: str) -> bool:
        """Whether the step's function has this parameter."""
        return parameter in inspect.signature(self.function).parameters


def clip(matrix: UpdateMatrix, weights: np.ndarray, *, norm: float | str = "median") -> np.ndarray:
    """Scales down rows longer than `norm` (static clipping), or than the median of the norms."""
    lengths = finite_norms(matrix)
    if isinstance(norm, str):
        if norm != "median":
            raise AggregationError(f'clip: norm must be a positive number or "median", not {norm!r}')
        return np.diag(_clip_factors(lengths, float(np.median(lengths))))
    require_positive("clip", "norm", norm)
    return np.diag(_clip_factors(lengths, norm))


def arc(matrix: UpdateMatrix, weights: np.ndarray, *, f: int) -> np.ndarray:
    """Adaptive robust clipping (Allouah et al. 2025, algorithm 2): the k = ⌊2 (f/n)(n − f)⌋ longest rows are
    clipped to the norm of the next one. Needs n > 2f."""
    rows = matrix.rows
    require("arc", "n > 2f (Allouah et al. 2025)", rows > 2 * f, n=rows, f=f)
    lengths = finite_norms(matrix)
    clipped = 2 * f * (rows - f) // rows
    return np.diag(_clip_factors(lengths, float(np.sort(lengths)[rows - clipped - 1])))


def nnm(matrix: UpdateMatrix, weights: np.ndarray, *, f: int) -> np.ndarray:
    """Nearest-neighbour mixing (Allouah et al. 2023, algorithm 2): every row becomes the mean of the
    n − f rows nearest to it, itself included. Needs n > 2f."""
    rows = matrix.rows
    require("nnm", "n > 2f (Allouah et al. 2023)", rows > 2 * f, n=rows, f=f)
    distances = without_rounding(squared_distances(finite_gram(matrix)))
    nearest = np.argsort(distances, axis=1, kind="stable")[:, : rows - f]
    mixing = np.zeros((rows, rows))
    np.put_along_axis(mixing, nearest, 1 / (rows - f), axis=1)
    return mixing


def bucketing(matrix: UpdateMatrix, weights: np.ndarray, *, size: int, seed: int) -> np.ndarray:
    """Bucketing (Karimireddy et al. 2022, algorithm 1): the means of random buckets of `size` rows,
    ⌈n/size⌉ of them. f byzantine rows can spoil f buckets: a rule behind it must stand f among
    that many."""
    if size < 1:
        raise AggregationError(f"bucketing: size must be at least 1, not {size}")
    return bucket_means(numpy_generator(seed, "bucketing").permutation(matrix.rows), size)


def bucket_means(order: np.ndarray, size: int) -> np.ndarray:
    """The mixing matrix [⌈n/size⌉, n] that averages successive groups of `size` rows of `order`."""
    mixing = np.zeros((math.ceil(len(order) / size), len(order)))
    for bucket in range(len(mixing)):
        members = order[bucket * size : (bucket + 1) * size]
        mixing[bucket, members] = 1 / len(members)
    return mixing


def _clip_factors(lengths: np.ndarray, bound: float) -> np.ndarray:
    return np.asarray(np.divide(bound, lengths, out=np.ones_like(lengths), where=lengths > bound))


PRE_AGGREGATIONS = {
    "clip": PreAggregation("clip", clip, needs_gram=False, scales_only=True),
    "arc": PreAggregation("arc", arc, needs_gram=False, scales_only=True),
    "nnm": PreAggregation("nnm", nnm, needs_gram=True, scales_only=False),
    "bucketing": PreAggregation("bucketing", bucketing, needs_gram=False, scales_only=False),
}


def find_pre_aggregation(name: str, folder: Path | None = None) -> PreAggregation:
    """The step that a job's `name` means, found as `find_rule` finds a rule. Raises ConfigError."""
    with named_at("aggregation", "pre"):
        definition = resolve("pre-aggregation", name, PRE_AGGREGATIONS, ENTRY_POINT_GROUP, folder)
        if isinstance(definition, PreAggregation):
            check_call(f"pre-aggregation {name!r}", definition.function, ARGUMENTS)
            return definition
        return PreAggregation(name, as_function("pre-aggregation", name, definition, ARGUMENTS))
