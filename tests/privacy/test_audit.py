"""The audit: its bound is the paper's, an honest training passes, and half the noise is caught."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from roundtable.core.errors import PrivacyError
from roundtable.privacy import SeededNoise
from roundtable.privacy.audit.one_run import one_run_audit


def load(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("privacy_audit", root / "benchmarks" / "privacy_audit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_perfect_guesses_give_the_bound_of_clopper_and_pearson() -> None:
    included = np.arange(100) >= 50
    audit = one_run_audit(np.arange(100.0), included, guesses=100, delta=0.0)
    chance = 0.05 ** (1 / 100)
    assert audit.right == 100
    assert audit.epsilon == pytest.approx(math.log(chance / (1 - chance)), abs=1e-3)
    assert one_run_audit(np.arange(100.0), included, guesses=100, delta=1e-3).epsilon < audit.epsilon


def test_guessing_blindly_shows_nothing() -> None:
    rng = np.random.default_rng(0)
    audit = one_run_audit(rng.random(2000), rng.random(2000) < 0.5, guesses=400, delta=1e-6)
    assert audit.epsilon < 0.25


def test_the_bound_is_right_in_nineteen_of_twenty_runs() -> None:
    """Randomised response with known ε, audited many times over."""
    epsilon, wrong = 1.0, 0
    truth = 1.0 / (1.0 + math.exp(-epsilon))
    rng = np.random.default_rng(1)
    for _ in range(60):
        included = rng.random(300) < 0.5
        kept = rng.random(300) < truth
        scores = np.where(included == kept, 1.0, -1.0) + rng.random(300) * 0.1
        wrong += one_run_audit(scores, included, guesses=200, delta=0.0).epsilon > epsilon
    assert wrong <= 8


def test_an_honest_training_passes_and_half_the_noise_is_caught(root: Path) -> None:
    bench = load(root)
    settings = {"canaries": 40_000, "guesses": 800, "epsilon": 2.0, "steps": 4, "rate": 1.0}
    honest = bench.run(**settings, sources=lambda purpose: SeededNoise(1, purpose))
    broken = bench.run(**settings, noise_scale=0.5, sources=lambda purpose: SeededNoise(1, purpose))
    assert 0.5 < honest.audit.epsilon <= honest.claimed
    assert broken.audit.epsilon > broken.claimed


def test_impossible_audits_are_refused() -> None:
    for guesses in (1, 11):
        with pytest.raises(PrivacyError):
            one_run_audit(np.zeros(10), np.zeros(10, dtype=bool), guesses, 1e-5)
