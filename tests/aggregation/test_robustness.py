"""The recommended rules under attack, against least accuracies computed elsewhere."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def benchmark(root: Path) -> ModuleType:
    sys.path.insert(0, str(root / "benchmarks"))
    return importlib.import_module("attacks")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("attack", ["sign_flip_x10", "ipm_opt", "inf"])
@pytest.mark.parametrize("rule", ["arc+nnm+trimmed_mean", "caf", "geomed"])
def test_recommended_rules_hold(
    benchmark: ModuleType, rule: str, attack: str, mnist_path: Path, reference_dir: Path
) -> None:
    table = json.loads((reference_dir / "attack_table.json").read_text())
    wanted = benchmark.least(table, rule, attack)
    assert wanted is not None
    assert benchmark.run(rule, attack, benchmark.load(mnist_path, 1.0, 0), 0) >= wanted[0]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_attack_is_one(benchmark: ModuleType, mnist_path: Path) -> None:
    """Against a plain mean the same attack ends at chance, so withstanding it means something."""
    assert benchmark.run("mean", "sign_flip_x10", benchmark.load(mnist_path, 1.0, 0), 0) < 0.2
