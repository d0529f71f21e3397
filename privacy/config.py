"""What a job asks of differential privacy: the `[privacy]` table, checked before anything runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from roundtable.core.errors import PrivacyError

LEVELS = ("none", "client", "client_local", "distributed", "example", "dp_ftrl")
CLIPPINGS = ("flat", "adaptive", "per_layer")
ACCOUNTANTS = ("pld", "rdp", "prv")
_ASKS = ("epsilon", "delta", "noise_multiplier")
MOST_NOISE = 1e6
LEAST_DELTA = 1e-13
DISTRIBUTED_MECHANISMS = ("skellam", "discrete_gaussian")


@dataclass(frozen=True)
class PrivacyConfig:
    """The privacy of one job. Build it with `from_table`, or directly; both check every value.

    `level` says whose presence is hidden and who adds the noise:

    - `none`: no differential privacy;
    - `client`: a whole silo is hidden, the coordinator adds Gaussian noise to the clipped sum;
    - `client_local`: a whole silo is hidden from everybody, each silo adds its own Gaussian noise;
    - `distributed`: a whole silo is hidden, each silo adds a share of discrete noise so that the
      securely aggregated sum is private;
    - `example`: one record inside a silo is hidden (DP-SGD at the silo);
    - `dp_ftrl`: a whole silo is hidden by noise correlated over rounds; no trust in the sampling.

    `epsilon` is the budget of the whole job; give it, or `noise_multiplier` (standard deviation of
    the noise over `clip_norm`), or both, where the budget then stops a job that would pass it.
    `population` is the number of units that `delta` protects: silos, or examples of one silo. Of silos it
    claims no amplification: that follows from how many there are when the job starts.
    `population_name` says whose privacy is spent: jobs of one name share one account (default: the task).
    `corruption` is the share of silos that secure aggregation assumes to collude with the coordinator, and
    `dropout_tolerance` the share that may drop out (default: a third of up to 50 silos, a fifth of more).
    `group_size` splits a securely aggregated cohort into groups of at least so many silos, whose means
    a robust rule then sees.
    `public_evaluation` states that the silos' test data are public, so that metrics on them may leave.
    """

    level: str = "none"
    epsilon: float | None = None
    delta: float | None = None
    noise_multiplier: float | None = None
    clip_norm: float | None = None
    clipping: str = "flat"
    quantile: float = 0.5
    clip_learning_rate: float = 0.2
    secure_aggregation: bool = False
    group_size: int | None = None
    corruption: float | None = None
    accountant: str = "pld"
    population: int | None = None
    population_name: str | None = None
    public_evaluation: bool = False
    mechanism: str = "skellam"
    bits: int = 24
    dropout_tolerance: float = 0.3
    bands: int = 16
    separation: int | None = None
    batch_size: int | None = None
    local_steps: int | None = None

    def __post_init__(self) -> None:
        _one_of("level", self.level, LEVELS)
        _one_of("clipping", self.clipping, CLIPPINGS)
        _one_of("accountant", self.accountant, ACCOUNTANTS)
        _one_of("mechanism", self.mechanism, DISTRIBUTED_MECHANISMS)
        _open_interval("quantile", self.quantile, 0.0, 1.0)
        _positive("clip_learning_rate", self.clip_learning_rate)
        _whole("bits", self.bits, 8, 32)
        _whole("bands", self.bands, 1, 1 << 20)
        if not 0.0 <= self.dropout_tolerance < 1.0:
            raise PrivacyError(
                f"privacy.dropout_tolerance is {self.dropout_tolerance}: give the share of a cohort that "
                "may be lost, at least 0 and below 1"
            )
        for name in ("separation", "population", "batch_size", "local_steps"):
            if (value := getattr(self, name)) is not None:
                _whole(name, value, 1, 1 << 53)
        if self.group_size is not None:
            _whole("group_size", self.group_size, 3, 1 << 16)
        if self.corruption is not None and not 0.0 <= self.corruption < 1.0:
            raise PrivacyError(
                f"privacy.corruption is {self.corruption}: give the share of silos that may collude with the "
                "coordinator, at least 0 and below 1"
            )
        for name in ("group_size", "corruption"):
            if getattr(self, name) is not None and not self.secure_aggregation:
                raise PrivacyError(
                    f"privacy.{name} belongs to secure aggregation: set privacy.secure_aggregation = true, "
                    "or leave it out"
                )
        if self.level != "none":
            self._check_private()

    def _check_private(self) -> None:
        if self.clip_norm is None:
            raise PrivacyError(
                f"privacy.clip_norm is missing: level {self.level!r} bounds every contribution by it; "
                "a first guess is the median norm of an update (or of an example's gradient)"
            )
        _positive("clip_norm", self.clip_norm)
        if self.epsilon is None and self.noise_multiplier is None:
            raise PrivacyError(
                "privacy.epsilon and privacy.noise_multiplier are both missing: give the budget, the noise, "
                "or both"
            )
        for name in ("epsilon", "noise_multiplier"):
            if (value := getattr(self, name)) is not None:
                _positive(name, value)
        if self.noise_multiplier is not None and self.noise_multiplier > MOST_NOISE:
            raise PrivacyError(
                f"privacy.noise_multiplier is {self.noise_multiplier:g}: no model is left under so much "
                f"noise, and no accountant can tell its epsilon from 0; give at most {MOST_NOISE:g}"
            )
        if self.delta is None:
            raise PrivacyError(
                "privacy.delta is missing: choose it well below 1 / population, for example 1e-5 for 1,000"
            )
        check_delta(self.delta, self.population)
        if self.clipping != "flat" and self.level != "client":
            raise PrivacyError(
                f"privacy.clipping = {self.clipping!r} needs level 'client', where one party sees every "
                f"norm; level {self.level!r} takes 'flat'"
            )
        if self.level == "distributed" and not self.secure_aggregation:
            raise PrivacyError(
                "privacy.level = 'distributed' without secure aggregation protects nobody: each silo adds "
                "only a share of the noise; set privacy.secure_aggregation = true, or use 'client_local'"
            )
        if self.level in ("client", "dp_ftrl") and self.secure_aggregation:
            raise PrivacyError(
                f"privacy.level = {self.level!r} needs the coordinator to check each norm, which secure "
                "aggregation hides; use level 'distributed' with secure_aggregation = true"
            )

    @property
    def private(self) -> bool:
        """Whether the job claims any guarantee."""
        return self.level != "none"

    @property
    def unit(self) -> str:
        """What one unit of privacy is: `client`, `example` or `none`."""
        return {"none": "none", "example": "example"}.get(self.level, "client")

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> PrivacyConfig:
        """Builds the configuration from the `[privacy]` table of a job file.

        Raises `PrivacyError` for an unknown key, a value of the wrong type, or one that makes no sense.
        """
        known = {field.name: str(field.type) for field in fields(cls)}
        for key, value in table.items():
            if key not in known:
                raise PrivacyError(f"privacy.{key} is not a setting; known are {', '.join(sorted(known))}")
            _typed(key, value, known[key])
        asked = [key for key in _ASKS if key in table]
        if asked and "level" not in table:
            raise PrivacyError(
                f"privacy.{asked[0]} without privacy.level would protect nobody: choose one of "
                f'{", ".join(LEVELS[1:])}; or state that there is to be no guarantee by level = "none"'
            )
        return cls(**table)


def check_delta(delta: float, population: int | None) -> None:
    """Raises `PrivacyError` unless 0 < `delta` < 1 / `population`: at 1/n, publishing one unit would do."""
    if not (isinstance(delta, int | float) and 0.0 < delta < 1.0):
        raise PrivacyError(f"privacy.delta is {delta}: it must be above 0 and below 1")
    if delta < LEAST_DELTA:
        raise PrivacyError(
            f"privacy.delta is {delta:g}: below {LEAST_DELTA:g} the rounding of the accountants is larger "
            "than what they are asked for; choose a larger one"
        )
    if population is not None and delta * population >= 1.0:
        raise PrivacyError(
            f"privacy.delta is {delta:g}, not below 1 / {population} = {1 / population:g}: publishing one "
            f"unit in the clear would satisfy it; choose at most {0.1 / population:.1g}"
        )


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise PrivacyError(f"privacy.{name} is {value!r}; choose one of {', '.join(allowed)}")


def _positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0.0):
        raise PrivacyError(f"privacy.{name} is {value}: it must be a finite number above 0")


def _open_interval(name: str, value: float, low: float, high: float) -> None:
    if not low < value < high:
        raise PrivacyError(
            f"privacy.{name} is {value}: it must lie between {low:g} and {high:g}, both excluded"
        )


def _whole(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise PrivacyError(f"privacy.{name} is {value!r}: it must be a whole number from {low} to {high}")


def _typed(name: str, value: Any, annotation: str) -> None:
    kinds: dict[str, tuple[type, ...]] = {
        "str": (str,),
        "bool": (bool,),
        "int": (int,),
        "float": (int, float),
    }
    wanted = annotation.split(" | ")[0]
    wrong_bool = isinstance(value, bool) and wanted != "bool"
    if wrong_bool or not isinstance(value, kinds[wanted]):
        raise PrivacyError(f"privacy.{name} is {value!r}: a value of type {wanted} belongs there")
