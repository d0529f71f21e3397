"""A `Charge`: what was released, described so that any accountant can compose it with what came before."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from roundtable.core.errors import PrivacyError

MECHANISMS = ("gaussian", "discrete_gaussian", "skellam")
SAMPLINGS = ("none", "poisson", "fixed_size")
RELATIONS = ("add_remove", "replace_one")


@dataclass(frozen=True)
class Charge:
    """One kind of release, repeated `steps` times.

    `parts` names the queries that one step answers about the same sample, each with its noise
    multiplier (standard deviation over what one unit can change): the update, and for example the
    clip bit or a metric. They are composed as the one joint release that they are, since a sample
    drawn once amplifies them together and not each apart. `relation` is the neighbouring relation
    that the multipliers refer to: `add_remove` (a unit is there or not) or `replace_one` (a unit
    has other data, for which the caller has already taken 2C as the change).

    `rate` belongs to Poisson sampling, and `groups` says from how many groups that take turns a sample is
    drawn, under noise that is correlated over their rounds: the same for one unit, and not for several.
    `sample` and `population` belong to fixed-size sampling; `grid_std`, `dimension` and `shares` to discrete
    noise: the standard deviation of the total on the integers, the length of the vector and the number of
    independent shares that make it up.
    """

    mechanism: str
    unit: str
    sampling: str
    parts: tuple[tuple[str, float], ...]
    steps: int = 1
    relation: str = "add_remove"
    rate: float = 1.0
    sample: int = 0
    population: int = 0
    grid_std: float = 0.0
    dimension: int = 0
    shares: int = 1
    groups: int = 1

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("mechanism", self.mechanism, MECHANISMS),
            ("sampling", self.sampling, SAMPLINGS),
            ("relation", self.relation, RELATIONS),
            ("unit", self.unit, ("client", "example")),
        ):
            if value not in allowed:
                raise PrivacyError(f"a charge's {name} is {value!r}; known are {', '.join(allowed)}")
        if not self.parts or any(not (math.isfinite(z) and z > 0.0) for _, z in self.parts):
            raise PrivacyError(
                f"a charge needs parts with noise above 0, not {self.parts}: without noise nothing is private"
            )
        if self.steps < 0:
            raise PrivacyError(f"a charge of {self.steps} steps makes no sense")
        self._check_sampling()
        if self.mechanism != "gaussian" and (self.grid_std <= 0.0 or self.dimension < 1 or self.shares < 1):
            raise PrivacyError(f"a {self.mechanism} charge needs grid_std, dimension and shares")

    def _check_sampling(self) -> None:
        if self.sampling == "poisson" and not 0.0 < self.rate <= 1.0:
            raise PrivacyError(f"the sampling rate is {self.rate}: it must be above 0 and at most 1")
        if self.groups < 1 or (self.groups > 1 and self.sampling != "poisson"):
            raise PrivacyError(f"{self.groups} groups that take turns belong to Poisson sampling")
        if self.sampling == "fixed_size" and not 0 < self.sample <= self.population:
            raise PrivacyError(
                f"a sample of {self.sample} from a population of {self.population} cannot be drawn"
            )
        if self.sampling == "fixed_size" and self.relation != "replace_one":
            raise PrivacyError("sampling of a fixed size is only accounted under the relation 'replace_one'")
        if self.sampling != "none" and self.mechanism != "gaussian":
            raise PrivacyError(
                f"no amplification by sampling is known here for {self.mechanism} noise; charge sampling "
                "'none'"
            )

    @property
    def noise_multiplier(self) -> float:
        """The multiplier of all parts together: (Σ z⁻²)^(-½)."""
        return math.sqrt(1.0 / sum(1.0 / (z * z) for _, z in self.parts))

    def scaled(self, noise_multiplier: float) -> Charge:
        """The same charge with the first part's noise multiplier replaced."""
        return replace(self, parts=((self.parts[0][0], noise_multiplier), *self.parts[1:]))

    def repeated(self, steps: int) -> Charge:
        """The same charge for another number of steps."""
        return replace(self, steps=steps)

    def repeated_by(self, times: int) -> Charge:
        """The same charge so many times over."""
        return replace(self, steps=self.steps * times)

    def to_json(self) -> str:
        """JSON with sorted keys: equal charges give equal text."""
        return json.dumps(asdict(self) | {"parts": dict(self.parts)}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Charge:
        """The inverse of `to_json`. Raises `PrivacyError` for anything else."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PrivacyError(f"a charge cannot be read: {error}") from error
        if not isinstance(data, dict) or not isinstance(data.get("parts"), dict):
            raise PrivacyError(f"a charge cannot be read from {text[:80]!r}")
        if unknown := set(data) - {field.name for field in fields(cls)}:
            raise PrivacyError(f"a charge has unknown fields {sorted(unknown)}: written by a newer version?")
        try:
            return cls(**data | {"parts": tuple((str(k), float(v)) for k, v in data["parts"].items())})
        except (TypeError, ValueError) as error:
            raise PrivacyError(f"a charge cannot be read: {error}") from error


def gaussian_charge(
    unit: str,
    sampling: Mapping[str, Any],
    noise_multiplier: float,
    *,
    part: str = "update",
    more: Mapping[str, float] | None = None,
    steps: int = 1,
) -> Charge:
    """The charge of central Gaussian noise of σ = noise_multiplier · C on a sum of contributions of norm ≤ C.

    `sampling` comes from `SamplingModel.fields()`. Where it is of a fixed size, replacing a unit moves
    the sum by 2C, so each multiplier is halved here and nowhere else.
    """
    parts = {part: noise_multiplier, **(more or {})}
    halve = sampling["sampling"] == "fixed_size"
    return Charge(
        mechanism="gaussian",
        unit=unit,
        parts=tuple((name, z / 2.0 if halve else z) for name, z in parts.items()),
        steps=steps,
        relation="replace_one" if halve else "add_remove",
        **sampling,
    )


def local_gaussian_charge(noise_multiplier: float, steps: int = 1) -> Charge:
    """The charge of `mechanisms.local_gaussian`, under replacement of a silo's update by any other."""
    parts = (("update", noise_multiplier / 2.0),)
    return Charge("gaussian", "client", "none", parts, steps, relation="replace_one")
