"""Which sampling an accountant may assume, given how the cohort is really chosen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from roundtable.core.errors import PrivacyError

_RARELY = 1e-3


@dataclass(frozen=True)
class SamplingModel:
    """What a selection strategy supports: `kind` is poisson, fixed_size or none; `sentence` says why.

    `population` is divided into `groups`, one of which a cohort is drawn from.
    """

    kind: str
    population: int
    cohort: float
    sentence: str
    groups: int = 1

    @property
    def rate(self) -> float:
        """Cohort over the population of a group."""
        return self.cohort * self.groups / self.population

    @property
    def nobody(self) -> float:
        """The chance that a round's cohort is empty, over the division into groups too; 0 of a fixed size."""
        return (1.0 - self.cohort / self.population) ** self.population if self.kind == "poisson" else 0.0

    def fields(self) -> Mapping[str, Any]:
        """The fields of a `Charge` that describe this sampling."""
        if self.kind == "poisson":
            return {"sampling": "poisson", "rate": self.rate}
        if self.kind == "fixed_size":
            return {"sampling": "fixed_size", "sample": math.ceil(self.cohort), "population": self.population}
        return {"sampling": "none"}


def cyclic_poisson(population: int, groups: int, probability: float) -> SamplingModel:
    """Rounds that draw from groups in turn, silos by coins of their own (Choquette-Choo et al. 2023).

    Raises `PrivacyError` for more groups than silos.
    """
    if groups > population:
        raise PrivacyError(
            f"privacy.separation = {groups}: so many groups cannot be made of {population} silos; lower it"
        )
    text = (
        f"The {population} silos are divided by secret chance into {groups} groups, which take turns; in its "
        f"turn each silo joins by its own secret coin of probability {probability:.4g}: amplification by "
        "Poisson sampling within the group, which holds against everybody who is not told who took part: all "
        "but those who run the coordinator's machine. A silo knows its own coin, which tells nothing of "
        "another's."
    )
    return _ending(SamplingModel("poisson", population, probability * population / groups, text, groups))


def _ending(sampling: SamplingModel) -> SamplingModel:
    """With a sentence on when empty rounds end, which tells who did not take part, where they are likely."""
    if sampling.nobody < _RARELY:
        return sampling
    text = (
        f"{sampling.sentence} A round of nobody, which comes with probability {sampling.nobody:.2g}, ends at "
        "once, and everybody can tell that by the time: what it says of who took part is not in epsilon. "
        "More silos in a round, or in a group, make it rare."
    )
    return replace(sampling, sentence=text)


def accountant_for(strategy: str, population: int, cohort: float, secret: bool = True) -> SamplingModel:
    """The sampling model that a selection strategy supports; under `poisson`, `cohort` is the expected size.

    Only `poisson` (each silo in or out by its own coin) and `uniform` (every set of the cohort's size
    equally likely) hide who took part; any other strategy lets the choice be guessed and gets no
    amplification. Both also need that the draw is `secret`, is made from the whole population, and is
    not topped up by whoever is online: an engine that replaces absent silos must ask for `online`.
    Raises `PrivacyError` for a cohort that the population cannot give.
    """
    if not 0 < cohort <= population:
        raise PrivacyError(f"a cohort of {cohort:g} cannot be drawn from a population of {population}")
    if not secret:
        text = (
            "Who takes part in a round is known (privacy.cohorts), so that no sampling amplifies: every "
            "round is charged as if each silo took part. That a silo took part is not hidden; what its data "
            "were is."
        )
        return SamplingModel("none", population, cohort, text)
    if strategy == "poisson":
        text = (
            f"Each of the {population} silos joins a round by its own secret coin of probability "
            f"{cohort / population:.4g}: amplification by Poisson sampling, which holds against everybody "
            "who is not told who took part: all but those who run the coordinator's machine. A silo knows "
            "its own coin, which tells nothing of another's."
        )
        return _ending(SamplingModel("poisson", population, cohort, text))
    if strategy == "uniform" and cohort == population:
        text = (
            f"All of the {population} silos take part in every round: there is no sampling to amplify it, "
            "and each round is charged exactly, for a silo that is absent instead of present."
        )
        return SamplingModel("none", population, cohort, text)
    if strategy == "uniform":
        text = (
            f"Each round draws {cohort:g} of the {population} silos uniformly without replacement: "
            "amplification for a "
            "fixed size, under replacement of one silo's data, which holds against everybody who is not told "
            "who took part and has no silo of its own. Silos that collude know which of them were drawn: "
            f"against k of them the rate is {cohort:g} / ({population} - k)."
        )
        return SamplingModel("fixed_size", population, cohort, text)
    text = (
        f"The selection strategy {strategy!r} depends on something other than secret chance, so it "
        "amplifies nothing: every round is charged as if each silo took part, and a silo that is absent "
        "counts as nothing in its place: that another is asked instead is not hidden. Use strategy 'poisson' "
        "or 'uniform', or level 'dp_ftrl'."
    )
    return SamplingModel("none", population, cohort, text)
