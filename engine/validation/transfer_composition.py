"""What an encoding of updates does not go together with, by its Traits; refused before round 1."""

from __future__ import annotations

import warnings
from pathlib import Path

from roundtable.aggregation import find_rule
from roundtable.core.config import JobConfig
from roundtable.core.encodings import get_encoding
from roundtable.core.errors import ConfigError, PrivacyError
from roundtable.core.privacy_table import ClientLocalLevel, ExampleLevel, NoPrivacy


def check_transfer(job: JobConfig, folder: Path | None = None) -> None:
    """Raises ConfigError or PrivacyError for what would be silently different.

    A coordinate-wise rule over values that each silo drew for itself sees mostly zeros: a median of ten silos
    keeps 8 to 16 % of its norm. `folder` is where a rule in a file lies.
    """
    rule, up = job.aggregation.rule, job.transfer.up
    support, said = get_encoding(up).traits.support, f"transfer.up = {up!r}"
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
    if job.transfer.remembers and not isinstance(job.privacy, NoPrivacy | ExampleLevel | ClientLocalLevel):
        raise PrivacyError(
            f"{said} with error feedback under privacy.level = {job.privacy.level!r}: what a silo remembers "
            "of rounds in which it took part comes with later updates, and no proof of amplification by "
            'sampling covers that: set transfer.feedback = "off"'
        )
