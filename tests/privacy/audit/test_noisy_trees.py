"""What a silo releases of boosted trees bears out the epsilon that it pays, and mistakes are caught."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from roundtable.client.training import private_training
from roundtable.core.analyses.boosted_trees import bounded_trees
from roundtable.privacy import SeededNoise, add_gaussian

CONFIDENCE = 1 - 1e-6


@pytest.fixture(scope="module")
def trees() -> Iterator[Any]:
    """The script that makes the figures of docs/privacy-audit.md."""
    root = next(each for each in Path(__file__).parents if (each / "benchmarks").is_dir())
    spec = importlib.util.spec_from_file_location("trees_audit", root / "benchmarks" / "trees_audit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_the_audited_row_moves_all_that_is_charged_and_the_noise_bears_it_out(
    trees: Any, tmp_path: Path
) -> None:
    """Of a number, a row moves each block by its whole reach: nothing of the budget is left unused."""
    silo = trees.AuditedSilo(tmp_path, 4.0, trees.KINDS["a number, splits at random"])
    found = trees.audit(silo, 24, CONFIDENCE)
    assert found.change == pytest.approx(1.0, abs=1e-6)
    assert 0.6 * found.claimed < found.noise <= found.claimed <= 4.0
    assert found.odd == ""


@pytest.mark.slow
@pytest.mark.parametrize("splits", ["random", "best"])
def test_many_jobs_come_near_to_the_stated_epsilon(trees: Any, tmp_path: Path, splits: str) -> None:
    kind = {"random": "a number, splits at random", "best": "a number, best splits"}[splits]
    silo = trees.AuditedSilo(tmp_path, 4.0, trees.KINDS[kind])
    found = trees.audit(silo, 400, CONFIDENCE)
    assert found.change == pytest.approx(1.0, abs=1e-6)
    assert 0.85 * found.claimed < found.noise <= found.claimed
    assert found.guessed <= found.claimed
    assert found.odd == ""


@pytest.mark.slow
@pytest.mark.parametrize("mistake", ["half the noise", "noise used again", "gradients beyond the bound"])
def test_mistakes_are_caught(
    trees: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    calls = [0]

    def weak(exact: torch.Tensor, noise: float, source: Any) -> Any:
        return add_gaussian(exact, noise / 2, source)

    def again(exact: torch.Tensor, noise: float, source: Any) -> Any:
        calls[0] += 1
        return add_gaussian(exact, noise, SeededNoise(7, (calls[0] - 1) // 5))

    def beyond(values: np.ndarray, bound: float, cut: Any = bounded_trees._cut_rows) -> np.ndarray:
        return np.asarray(cut(values, 1.5 * bound))

    if mistake == "gradients beyond the bound":
        monkeypatch.setattr(bounded_trees, "_cut_rows", beyond)
    else:
        made = weak if mistake == "half the noise" else again
        monkeypatch.setattr(private_training, "add_gaussian", made)
    silo = trees.AuditedSilo(tmp_path, 4.0, trees.KINDS["a number, splits at random"])
    found = trees.audit(silo, 100, CONFIDENCE)
    assert found.noise > found.claimed
