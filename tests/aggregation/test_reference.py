"""Every rule against small cases whose results were computed elsewhere, in float64, by brute force."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from roundtable.aggregation import MixedRows, TensorMatrix, UpdateMatrix, gram, squared_distances
from roundtable.aggregation import preaggregation as pre
from roundtable.aggregation.attacks import (
    a_little_is_enough,
    alie_z_max,
    inner_product_manipulation,
    sign_flip,
)
from roundtable.aggregation.registry import find_rule
from roundtable.aggregation.rules.krum import krum_scores, mean_of_rows
from roundtable.core.errors import AggregationError

Case = dict[str, Any]
TOLERANCE = {
    "geometric_median_exact": 1e-6,
    "caf_max_over_support": 1e-6,
    "smea_exact": 1e-7,
}
PEER_CONVENTIONS = {"caf_max_over_all"}
"""Definitions of peers that differ from the paper; there is nothing of ours to compare with."""


def run(name: str, matrix: UpdateMatrix, **parameters: Any) -> torch.Tensor:
    result = find_rule(name).function(matrix, np.ones(matrix.rows), **parameters)
    return result.vector


def mixed(matrix: UpdateMatrix, step: Callable[..., np.ndarray], **parameters: Any) -> MixedRows:
    return MixedRows(matrix, step(matrix, np.ones(matrix.rows), **parameters))


def rows(matrix: UpdateMatrix) -> torch.Tensor:
    return matrix.block(0, matrix.columns)


def krum(matrix: UpdateMatrix, f: int, neighbours: str, m: str | None = None) -> torch.Tensor:
    """Krum by its scores, for conventions and numbers of byzantine silos that the public rule refuses."""
    count = matrix.rows - f - {"n-f-2": 2, "n-f-1": 1}[neighbours]
    size = {None: 1, "n-f": matrix.rows - f, "n-f-2": matrix.rows - f - 2}[m]
    scores = krum_scores(squared_distances(gram(matrix)), count)
    vector = mean_of_rows(matrix, np.argsort(scores, kind="stable")[:size]).vector
    name, options = ("krum", {}) if m is None else ("multi_krum", {"m": size})
    if matrix.rows <= 2 * f + 2:
        with pytest.raises(AggregationError, match=r"n > 2f \+ 2"):
            run(name, matrix, f=f, **options)
    elif neighbours == "n-f-2":
        assert torch.equal(run(name, matrix, f=f, **options), vector)
    return vector


def geometric_median(matrix: UpdateMatrix, nu: float, T: int, **_: Any) -> torch.Tensor:
    options = {"smoothing": nu, "max_iterations": T, "tolerance": 0.0, "start": "zeros"}
    return run("geometric_median", matrix, **options)


def honest(matrix: UpdateMatrix, params: Case) -> torch.Tensor:
    return rows(matrix)[: int(params["honest"].split("..")[1]) + 1]


def fltrust(matrix: UpdateMatrix) -> torch.Tensor:
    values = rows(matrix)
    return run("fltrust", TensorMatrix(values[1:]), root_update=values[0])


def weighted_mean(matrix: UpdateMatrix, weights: list[float]) -> torch.Tensor:
    return find_rule("mean").function(matrix, np.array(weights)).vector


def bucketing(matrix: UpdateMatrix, s: int, perm: list[int]) -> torch.Tensor:
    return rows(MixedRows(matrix, pre.bucket_means(np.array(perm), s)))


def arc_nnm(matrix: UpdateMatrix, f: int) -> UpdateMatrix:
    return mixed(mixed(matrix, pre.arc, f=f), pre.nnm, f=f)


def evaluate(case: Case, matrix: UpdateMatrix) -> torch.Tensor:
    params = case["params"]
    f = params.get("f")
    simple: dict[str, Callable[[], torch.Tensor]] = {
        "mean": partial(run, "mean", matrix),
        "weighted_mean": partial(weighted_mean, matrix, **params),
        "median": partial(run, "median", matrix),
        "trimmed_mean": partial(run, "trimmed_mean", matrix, f=f),
        "meamed": partial(run, "mean_around_median", matrix, f=f),
        "krum": lambda: krum(matrix, **params),
        "multi_krum": lambda: krum(matrix, **params),
        "bulyan": partial(run, "bulyan", matrix, f=f),
        "mda": partial(run, "minimum_diameter_averaging", matrix, f=f),
        "smea_exact": partial(run, "smea", matrix, f=f),
        "caf_max_over_support": partial(run, "caf", matrix, f=f),
        "monna": lambda: run("monna", matrix, f=f, pivot=params["idx"]),
        "geometric_median_exact": partial(run, "geometric_median", matrix, smoothing=1e-12),
        "geometric_median_smoothed": lambda: geometric_median(matrix, **params),
        "centered_clipping": lambda: run(
            "centred_clipping", matrix, tau=params["tau"], iterations=params["L"]
        ),
        "fltrust": partial(fltrust, matrix),
        "clip_l2": lambda: rows(mixed(matrix, pre.clip, norm=params["c"])),
        "arc": lambda: rows(mixed(matrix, pre.arc, f=f)),
        "nnm": lambda: rows(mixed(matrix, pre.nnm, f=f)),
        "bucketing": lambda: bucketing(matrix, **params),
        "nnm+trimmed_mean": lambda: run("trimmed_mean", mixed(matrix, pre.nnm, f=f), f=f),
        "nnm+median": lambda: run("median", mixed(matrix, pre.nnm, f=f)),
        "nnm+geometric_median_smoothed": lambda: geometric_median(mixed(matrix, pre.nnm, f=f), **params),
        "nnm+krum": lambda: krum(mixed(matrix, pre.nnm, f=f), **params),
        "arc+nnm+trimmed_mean": lambda: run("trimmed_mean", arc_nnm(matrix, f), f=f),
        "attack_sign_flip": lambda: sign_flip(honest(matrix, params), 1)[0],
        "attack_alie": lambda: a_little_is_enough(honest(matrix, params), 1, -params["tau"])[0],
        "attack_ipm": lambda: inner_product_manipulation(honest(matrix, params), 1, params["tau"])[0],
    }
    return simple[case["rule"]]()


def cases(reference_dir: Path) -> Iterator[tuple[Case, UpdateMatrix]]:
    content = json.loads((reference_dir / "aggregation_cases.json").read_text())
    for case in content["cases"]:
        if case["rule"] not in PEER_CONVENTIONS:
            values = torch.tensor(content["matrices"][case["matrix"]], dtype=torch.float64)
            yield case, TensorMatrix(values)


def test_every_case_matches(reference_dir: Path) -> None:
    wrong, checked = [], 0
    for case, matrix in cases(reference_dir):
        expected = np.array(case["expected"], dtype=np.float64)
        label = f"{case['rule']} {case['matrix']} {case['params']}"
        if np.isnan(expected).any():
            with pytest.raises(AggregationError, match="zero"):
                evaluate(case, matrix)
            checked += 1
            continue
        found = evaluate(case, matrix).numpy()
        tolerance = TOLERANCE.get(case["rule"], 1e-9)
        scale = max(float(np.abs(expected).max()), 1e-6 * float(rows(matrix).abs().max()))
        if not np.abs(found - expected).max() <= tolerance * scale:
            wrong.append(f"{label}: {found} instead of {expected}")
        checked += 1
    assert not wrong, f"{len(wrong)} of {checked}:\n" + "\n".join(wrong)
    assert checked == 664


def test_alie_z_max(reference_dir: Path) -> None:
    content = json.loads((reference_dir / "aggregation_cases.json").read_text())
    for case in content["alie_zmax"]:
        assert alie_z_max(case["n"], case["f"]) == pytest.approx(case["z"], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("through", ["rows", "a mixing"])
def test_the_geometric_median_of_near_duplicates_far_from_the_origin(through: str) -> None:
    """As of the differences alone, which are exact here: the median moves with its points.

    By the Gram matrix their squared distances have no digit left.
    """
    generator = np.random.default_rng(5)
    apart = np.round(generator.standard_normal((7, 40)) * 2**10) * 2.0**-30
    apart[6] *= 1e6
    far = np.round(generator.standard_normal(40) * 2**10) * 2.0**-2
    values = torch.from_numpy(far + apart)
    matrix: UpdateMatrix = TensorMatrix(values)
    if through == "a mixing":
        matrix = MixedRows(matrix, np.eye(7))
    found = run("geometric_median", matrix, smoothing=1e-15).numpy() - far
    middle = apart.mean(axis=0)
    for _ in range(5000):
        pull = 1 / np.maximum(np.linalg.norm(apart - middle, axis=1), 1e-30)
        middle = pull @ apart / pull.sum()
    spread = np.median(np.linalg.norm(apart - middle, axis=1))
    # The answer itself lies as far out as the rows, and is rounded there.
    assert np.linalg.norm(found - middle) < 1e-6 * spread + 40 * np.spacing(np.abs(far).max())
