"""What an encoding of updates does not go together with, by its Traits; refused before round 1."""

from __future__ import annotations

import warnings
from pathlib import Path

from roundtable.aggregation import find_rule
from roundtable.core.config import JobConfig
from roundtable.core.encodings import Traits, get_encoding
from roundtable.core.errors import ConfigError, PrivacyError
from roundtable.core.privacy_table import BareUpdates


def check_transfer(job: JobConfig, folder: Path | None = None) -> None:
    """Raises ConfigError or PrivacyError for what would be silently different.

    A coordinate-wise rule over values that each silo drew for itself sees mostly zeros: a median of ten silos
    keeps 8 to 16 % of its norm. `folder` is where a rule in a file lies.
    """
    rule, up = job.aggregation.rule, job.transfer.up
    traits, said = get_encoding(up).traits, f"transfer.up = {up!r}"
    support = traits.support
    by_coordinate = support in ("seeded", "own") and find_rule(rule, folder).kept is not None
    if by_coordinate and support == "seeded":
        raise ConfigError(
            f"{said} and aggregation.rule = {rule!r}: each silo sends other values, and a rule that looks at "
            'each coordinate by itself would see mostly zeros: set indices=cohort, or rule = "mean"'
        )
    if by_coordinate:
        warnings.warn(
            f"{said} under aggregation.rule = {rule!r}: values that a silo left out count as zero in each "
            "coordinate, which shortens the aggregate",
            stacklevel=3,
        )
    _check_private(job, traits, said)


def _check_private(job: JobConfig, traits: Traits, said: str) -> None:
    """Where the coordinator adds the noise; a silo that adds its own encodes what is private already."""
    if not isinstance(job.privacy, BareUpdates):
        return
    under = f"under privacy.level = {job.privacy.level!r}"
    if job.transfer.remembers:
        raise PrivacyError(
            f"{said} with error feedback {under}: what a silo remembers "
            "of rounds in which it took part comes with later updates, and no proof of amplification by "
            'sampling covers that: set transfer.feedback = "off"'
        )
    if get_encoding(job.transfer.up).keeps:
        raise PrivacyError(
            f"{said} {under}: the factors that a silo keeps are of rounds in which it took part, they come "
            "with later updates, and no proof of amplification by sampling covers that: set warm=false"
        )
    if traits.scaled:
        raise PrivacyError(
            f"{said} {under}: the coordinator clips what it decoded, and values that are multiplied by d/k "
            "before would be clipped away: multiply after the noise, by scaled=false, transfer.feedback = "
            '"off", and d/k times aggregation.server_optimizer.learning_rate'
        )
