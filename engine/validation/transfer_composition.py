"""What an encoding of updates does not go together with, by its Traits; refused before round 1."""

from __future__ import annotations

import warnings
from pathlib import Path

from roundtable.aggregation import find_rule
from roundtable.core.config import JobConfig
from roundtable.core.encodings import Encoding, get_encoding
from roundtable.core.encodings.assembly import foreign_stages
from roundtable.core.encodings.sparse import RandomK
from roundtable.core.errors import ConfigError, EncodingError, PrivacyError
from roundtable.core.plugins.calls import named_at
from roundtable.core.privacy_table import BareUpdates, FtrlLevel, NoPrivacy, masking_of


def check_transfer(job: JobConfig, folder: Path | None = None) -> None:
    """Raises ConfigError or PrivacyError for what would be silently different.

    A coordinate-wise rule over values that each silo drew for itself sees mostly zeros: a median of ten silos
    keeps 8 to 16 % of its norm. `folder` is where a rule or an encoding in a file lies.
    """
    said = f"transfer.up = {job.transfer.up!r}"
    if job.transfer.automatic:
        _check_choice(job, said)
    for chain in job.transfer.chains:
        _check_chain(job, chain, f"{said} ({chain})" if job.transfer.automatic else said, folder)


def _check_choice(job: JobConfig, said: str) -> None:
    """Where what is chosen would tell of a silo's data, or nobody would notice that it matters."""
    if not isinstance(job.privacy, NoPrivacy):
        raise PrivacyError(
            f"{said} under privacy.level = {job.privacy.level!r}: what is chosen follows from how long each "
            "silo takes and from what encoding loses of its updates, and is told; no proof covers that: name "
            "an encoding"
        )


def _check_chain(job: JobConfig, up: str, said: str, folder: Path | None) -> None:
    rule, encoding = job.aggregation.rule, _encoding_of(job, up, said, folder)
    support = encoding.traits.support
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
            stacklevel=4,
        )
    _check_private(job, encoding, said)
    if job.common_rank is not None:
        _check_common(job, said, folder)
    if job.transfer.memory.way == "ef21":
        _check_fixed_cohort(job)
    if job.transfer.momentum and job.aggregation.server_optimizer.name != "fedavg":
        raise ConfigError(
            f"transfer.momentum = {job.transfer.momentum} and server_optimizer = "
            f"{job.aggregation.server_optimizer.name!r}: the silos' momentum stands for the server's, and "
            'both would add up; set name = "fedavg"',
            key=("transfer", "momentum"),
        )


def _check_common(job: JobConfig, said: str, folder: Path | None) -> None:
    """What factors by a basis of the cohort ask for."""
    if masking_of(job.privacy) is None:
        raise ConfigError(
            f"{said}: factors by a basis of the cohort are for sums, and here each update travels by "
            "itself: leave out basis=cohort, which is better then, or set privacy.secure_aggregation = true",
            key=("transfer", "up"),
        )
    if find_rule(job.aggregation.rule, folder).takes("previous"):
        raise ConfigError(
            f"{said} and aggregation.rule = {job.aggregation.rule!r}: it starts from the last round's "
            "aggregate, which had another basis; choose another rule, or leave transfer.up out"
        )


def _encoding_of(job: JobConfig, up: str, said: str, folder: Path | None) -> Encoding:
    """An encoding of updates, and what is asked of one of others once it may run."""
    with named_at("transfer", "up"):
        try:
            encoding = get_encoding(up, folder)
        except EncodingError as error:
            raise ConfigError(str(error)) from error
        traits = encoding.traits
        if not foreign_stages(up):
            return encoding
        if objection := job.transfer.objection(up, traits):
            raise ConfigError(objection, key=("transfer", "feedback"))
        if traits.feedback and job.transfer.feedback == "auto" and not job.transfer.remembers:
            raise ConfigError(
                f"{said}: its traits ask for error feedback, and of an encoding of others the job says it: "
                'set transfer.feedback = "on" or "off"',
                key=("transfer", "feedback"),
            )
    return encoding


def check_cohort_is_all(job: JobConfig, population: int) -> None:
    """ConfigError where EF21 or an exact analysis has more clients than take part in a round."""
    if job.algorithm.exact and population != job.cohort.size:
        raise ConfigError(
            f"cohort.size = {job.cohort.size}, and there are {population} clients for algorithm "
            f"{job.algorithm.name!r}: its sums are over the same clients in every round, so all take part"
        )
    if job.transfer.memory.way == "ef21" and population > (job.cohort.size or 0):
        raise ConfigError(
            f"{_EF21}, and this one asks {job.cohort.size} of {population} clients: set cohort.size = "
            f'{population}, or feedback = "on"',
            key=("transfer", "feedback"),
        )


_EF21 = 'transfer.feedback = "ef21": what the server adds to is the mean of the same silos in each round'


def _check_fixed_cohort(job: JobConfig) -> None:
    """EF21 (Richtárik et al. 2021) is of rounds in which everybody takes part, and of a plain mean.

    Where some are drawn, only theirs would move, and that is the slowest feedback of all (Fatkhullin et al.
    2021, table 1): `on` is better.
    """
    cohort, table = job.cohort, job.aggregation
    fixed = cohort.size is not None and cohort.minimum == cohort.size and cohort.over_selection == 1.0
    if not fixed or cohort.strategy != "uniform" or job.round.mode != "synchronous":
        raise ConfigError(
            f'{_EF21}: set cohort.size and cohort.minimum to their number, strategy = "uniform", '
            'over_selection = 1 and round.mode = "synchronous", or feedback = "on"',
            key=("transfer", "feedback"),
        )
    if table.rule != "mean" or table.pre or table.weighting not in ("uniform", "custom"):
        raise ConfigError(
            f'{_EF21}, each with the same weight: set aggregation.rule = "mean" without pre, and weighting = '
            '"uniform" or "custom"',
            key=("transfer", "feedback"),
        )
    if table.validation.policy == "clip" or table.validation.norm_ratio != "off":
        raise ConfigError(
            f"{_EF21}, whole: differences of a silo may be longer than others'; set "
            'aggregation.validation.norm_ratio = "off" and leave policy = "clip" out',
            key=("transfer", "feedback"),
        )
    if not isinstance(job.privacy, NoPrivacy):
        raise PrivacyError(
            f"{_EF21}, and under privacy.level = {job.privacy.level!r} no single round's noise or masks "
            'cover what is added up over rounds: set feedback = "off"'
        )


def as_counted(job: JobConfig, chain: str, folder: Path | None = None) -> Encoding:
    """How the coordinator decodes updates: random-k without its factor where clip and noise come first.

    `folder` is where an encoding in a file lies.
    """
    thin = _thinned(job, chain, folder)
    return thin.unscaled() if thin else get_encoding(chain, folder)


def thinned(job: JobConfig, folder: Path | None = None) -> RandomK | None:
    """The random-k that makes up for what was not sent, after the noise; None where there is none."""
    return None if job.transfer.automatic else _thinned(job, job.transfer.up, folder)


def _thinned(job: JobConfig, chain: str, folder: Path | None) -> RandomK | None:
    if not isinstance(job.privacy, BareUpdates):
        return None
    encoding = get_encoding(chain, folder)
    return encoding if isinstance(encoding, RandomK) and encoding.traits.scaled else None


def _check_private(job: JobConfig, encoding: Encoding, said: str) -> None:
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
    if encoding.keeps:
        raise PrivacyError(
            f"{said} {under}: the factors that a silo keeps are of rounds in which it took part, they come "
            "with later updates, and no proof of amplification by sampling covers that: set warm=false"
        )
    if encoding.traits.size_tells:
        raise PrivacyError(
            f"{said} {under}: how many bytes an update has depends on its values, and whoever watches the "
            "line counts them: no noise covers that. Choose what has always as many, like int4 or randomk"
        )
    traits = encoding.traits
    if traits.scaled and not isinstance(encoding, RandomK):
        raise PrivacyError(
            f"{said} {under}: the coordinator clips what it decoded, and values that stand for others too "
            "would be clipped away; choose what is not scaled, or randomk, which is scaled after the noise"
        )
    if traits.scaled and traits.support == "cohort" and isinstance(job.privacy, FtrlLevel):
        raise PrivacyError(
            f"{said} {under}: the noise of a round takes off that of earlier ones, which had other places: "
            "set indices=own"
        )
