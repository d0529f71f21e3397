"""The rules and the attacks of the table in attacks.py, by the names that the reference uses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from roundtable.aggregation import AggregationConfig, attacks

SILOS, HOSTILE, ROUNDS, STEPS, BATCH, RATE = 20, 4, 40, 10, 32, 0.1
SIZES = ((784, 100), (100, 10))
F = {"f": HOSTILE}

RULES: dict[str, AggregationConfig] = {
    "mean": AggregationConfig("mean"),
    "median": AggregationConfig("median"),
    "trimmed_mean": AggregationConfig("trimmed_mean", F),
    "meamed": AggregationConfig("mean_around_median", F),
    "krum": AggregationConfig("krum", F),
    "multi_krum": AggregationConfig("multi_krum", F),
    "geomed": AggregationConfig("geometric_median"),
    "geomed_byzfl_nu.1_T3": AggregationConfig(
        "geometric_median", {"smoothing": 0.1, "tolerance": 0.0, "max_iterations": 3, "start": "zeros"}
    ),
    "cclip_tau1_L3": AggregationConfig("centred_clipping", {"tau": 1.0, "iterations": 3}),
    "mda": AggregationConfig("minimum_diameter_averaging", F),
    "caf": AggregationConfig("caf", F),
    "bulyan": AggregationConfig("bulyan", F),
    "clip_median_norm+mean": AggregationConfig("mean", pre=(("clip", {}),)),
    "bucketing2+median": AggregationConfig("median", pre=(("bucketing", {"size": 2}),)),
    "nnm+median": AggregationConfig("median", pre=(("nnm", F),)),
    "nnm+trimmed_mean": AggregationConfig("trimmed_mean", F, pre=(("nnm", F),)),
    "nnm+krum": AggregationConfig("krum", F, pre=(("nnm", F),)),
    "nnm+geomed": AggregationConfig("geometric_median", pre=(("nnm", F),)),
    "arc+nnm+trimmed_mean": AggregationConfig("trimmed_mean", F, pre=(("arc", F), ("nnm", F))),
    "arc+nnm+geomed": AggregationConfig("geometric_median", pre=(("arc", F), ("nnm", F))),
    "fltrust_root100": AggregationConfig("fltrust"),
    "dnc": AggregationConfig("dnc", F),
    "smea": AggregationConfig("smea", F),
    "monna_trusts_silo-00": AggregationConfig("monna", {**F, "pivot": "silo-00"}),
    "foolsgold": AggregationConfig("foolsgold"),
    "mean_nofilter": AggregationConfig("mean"),
}
RULES = {
    name: AggregationConfig(rule.rule, rule.parameters, rule.pre, weighting="uniform")
    for name, rule in RULES.items()
}

STRENGTHS: dict[str, tuple[float, ...]] = {
    "alie": (-3.0, -2.0, -1.0, -0.5, -0.25, 0.25, 0.5, 1.0, 2.0, 3.0),
    "ipm": (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0),
}
"""What the tuned attackers try. The reference does not say what its own tried: a mean under its ALIE ends
where three standard deviations bring it, and Krum under its IPM where strengths from a quarter on do. The
attackers named `_wide` try ±4 and ±8 and a tenth as well, which is what `attacks.tuned` does by itself."""

Attack = Callable[[torch.Tensor, attacks.Defence, int], torch.Tensor]

ATTACKS: dict[str, Attack | None] = {
    "none": None,
    "sign_flip": lambda honest, _, __: attacks.sign_flip(honest, HOSTILE),
    "sign_flip_x10": lambda honest, _, __: attacks.sign_flip(honest, HOSTILE, 10.0),
    "alie_z1.5": lambda honest, _, __: attacks.a_little_is_enough(honest, HOSTILE, -1.5),
    "alie_zmax0.16_neg": lambda honest, _, __: attacks.a_little_is_enough(honest, HOSTILE),
    "ipm_0.5": lambda honest, _, __: attacks.inner_product_manipulation(honest, HOSTILE, 0.5),
    "ipm_2": lambda honest, _, __: attacks.inner_product_manipulation(honest, HOSTILE, 2.0),
    "label_flip": None,
    "gaussian_s1": lambda honest, _, round: attacks.gaussian(honest, HOSTILE, seed=round),
    "inf": lambda honest, _, __: attacks.infinities(honest, HOSTILE),
    "nan": lambda honest, _, __: attacks.not_a_number(honest, HOSTILE),
    "alie_opt": lambda honest, defence, _: attacks.tuned(honest, HOSTILE, defence, "alie", STRENGTHS["alie"]),
    "ipm_opt": lambda honest, defence, _: attacks.tuned(honest, HOSTILE, defence, "ipm", STRENGTHS["ipm"]),
    "alie_opt_wide": lambda honest, defence, _: attacks.tuned(honest, HOSTILE, defence, "alie"),
    "ipm_opt_wide": lambda honest, defence, _: attacks.tuned(honest, HOSTILE, defence, "ipm"),
    "mimic": lambda honest, _, __: attacks.mimic(honest, HOSTILE),
}

SIMULATED: dict[str, dict[str, object] | None] = {
    "none": None,
    "sign_flip": {"name": "sign_flip", "scale": 1.0},
    "sign_flip_x10": {"name": "sign_flip", "scale": 10.0},
    "alie_z1.5": {"name": "alie", "z": -1.5},
    "alie_zmax0.16_neg": {"name": "alie"},
    "ipm_0.5": {"name": "ipm", "tau": 0.5},
    "ipm_2": {"name": "ipm", "tau": 2.0},
    "label_flip": {"name": "label_flip", "classes": 10},
    "gaussian_s1": {"name": "gaussian", "scale": 1.0},
    "inf": {"name": "infinities"},
    "nan": {"name": "nan"},
    "mimic": {"name": "mimic"},
    "alie_opt_wide": {"name": "tuned_alie"},
    "ipm_opt_wide": {"name": "tuned_ipm"},
}
"""The attacks that a job file can ask for."""

NOT_SIMULATED = ("monna_trusts_silo-00", "mean_nofilter")
"""Silos of a simulation have other names, and its pipeline cannot be told to let NaN pass."""


def least(table: dict[str, Any], rule: str, attack: str) -> tuple[float, int] | None:
    """The accuracy that a reference table asks for, and the number of its seeds; None without such a cell."""
    for part in ("fixed_attacks_dirichlet1", "adaptive_attacks_dirichlet1"):
        found = table.get(part, {}).get(rule, {}).get(attack)
        if found:
            return float(found["at_least"]), int(found["seeds"])
    return None


class Results:
    """Accuracies by rule, attack, α, seed and way of training; kept in a file where one is named."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[tuple[object, ...], float] = {}

    def get(self, work: Callable[[], float], *key: object) -> float:
        """The accuracy under this key: known, or else worked out and kept."""
        self._read()
        if key not in self._known:
            self._known[key] = work()
            if self._path is not None:
                with self._path.open("a") as file:
                    file.write(json.dumps([*key, self._known[key]]) + "\n")
        return self._known[key]

    def _read(self) -> None:
        if self._path is not None and self._path.is_file():
            for line in self._path.read_text().splitlines():
                *key, accuracy = json.loads(line)
                self._known[tuple(key)] = accuracy
