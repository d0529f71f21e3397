"""Checks jobs with secure aggregation, and computes how many silos their rounds need at least."""

from __future__ import annotations

from roundtable.aggregation import AggregationConfig
from roundtable.core.config import NORM_RATIO, WEIGHT_RATIO, JobConfig
from roundtable.core.encodings.assembly import foreign_stages, get_encoding
from roundtable.core.errors import PrivacyError
from roundtable.core.job_tables.metrics_table import check_summed
from roundtable.core.layout import Layout
from roundtable.core.measures.families import families_in
from roundtable.core.privacy_table import DistributedLevel, Masking, NoPrivacy, masking_of
from roundtable.engine.selection import quorum
from roundtable.privacy import (
    SecureRound,
    fewest_survivors,
    most_summed,
    shared_noise,
    values_masked,
    why_not_masked,
)
from roundtable.privacy.secagg import MINIMUM_COHORT, Least, Quantiser, largest_group, overrun
from roundtable.privacy.secure_round import ROTATED_UP_TO

FEWEST_GROUPS = 3
"""Groups that a robust rule needs at least: of two means it cannot outvote either."""


def check_secure(job: JobConfig, aggregation: AggregationConfig) -> None:
    """Raises PrivacyError for settings that need single updates; does nothing without secure aggregation."""
    masking = masking_of(job.privacy)
    if masking is None:
        return
    hidden = "under secure aggregation nobody sees a single update"
    if masking.group_size is not None:
        _check_groups(job, aggregation, masking.group_size)
    elif aggregation.rule != "mean" or aggregation.pre:
        raise PrivacyError(
            f"aggregation.rule = {aggregation.rule!r} with {len(aggregation.pre)} pre-aggregations: "
            f"{hidden}, "
            'so that only their mean can be had; use rule = "mean" without pre, or give privacy.group_size '
            "to let the rule see the means of groups"
        )
    if aggregation.weighting not in ("examples", "uniform"):
        raise PrivacyError(
            f'aggregation.weighting = "{aggregation.weighting}": {hidden} nor its loss; use "examples" or '
            '"uniform", by which each silo weighs its own'
        )
    if aggregation.validation != "exclude" or aggregation.max_norm is not None:
        raise PrivacyError(
            f"aggregation.validation: {hidden}; silos clip to clip_norm, so leave policy and max_norm out"
        )
    _check_ratios(job, hidden)
    _check_ring(job, masking)
    watched = job.stop.metric is not None and not job.algorithm.exact
    in_the_clear = not job.evaluation.bounds and (job.evaluation.every != 0 or watched)
    if in_the_clear and not job.privacy.public_evaluation:
        raise PrivacyError(
            "evaluation and stop: test metrics of single silos would leave them in the clear, beside the "
            "secure sum; let them travel inside it by evaluation.bounds = { accuracy = 1.0 }, or set "
            "evaluation.every = 0 and leave out stop.metric (the training loss is summed securely), or state "
            "that the silos' test data are public by privacy.public_evaluation = true"
        )
    _check_secure_rounds(job)


def check_bounds(job: JobConfig) -> None:
    """Raises PrivacyError for metrics to sum (`evaluation.bounds`) that no masked vector can hold."""
    bounds = job.evaluation.bounds
    if not bounds:
        return
    if isinstance(job.privacy, DistributedLevel):
        raise PrivacyError(
            'evaluation.bounds with privacy.level = "distributed": exact sums of metrics beside the noisy '
            "sum of updates would tell more than the noise allows; leave bounds out and set "
            "evaluation.every = 0"
        )
    if masking_of(job.privacy) is None:
        raise PrivacyError(
            "evaluation.bounds: metrics are summed inside the masked vectors of secure aggregation, which "
            "this job does not ask for; leave bounds out, or set privacy.secure_aggregation = true"
        )
    if job.privacy.public_evaluation:
        raise PrivacyError(
            "evaluation.bounds with privacy.public_evaluation = true: metrics either travel inside the "
            "secure sum or leave each silo in the clear; leave one of the two out"
        )
    check_summed(job.metrics, bounds)
    figures = {name for family in families_in(bounds) for name in family.figures({})}
    if job.stop.metric is not None and job.stop.metric not in {*bounds, *job.metrics, *figures}:
        raise PrivacyError(
            f"stop.metric = {job.stop.metric!r} is not among the metrics that are summed (evaluation.bounds: "
            f"{', '.join(sorted(bounds))}): it would never end the job; add its bound"
        )


def _check_ratios(job: JobConfig, hidden: str) -> None:
    """Defaults are left alone: docs/robustness.md says that they do not count here."""
    table = job.aggregation.validation
    for name, usual in (("weight_ratio", WEIGHT_RATIO), ("norm_ratio", NORM_RATIO)):
        if getattr(table, name) not in (usual, "off"):
            raise PrivacyError(
                f"aggregation.validation.{name}: {hidden}, so nothing can be compared with a median; silos "
                "clip to clip_norm and the encoding bounds what one may weigh: leave it out"
            )


def _check_ring(job: JobConfig, masking: Masking) -> None:
    """Small rings hold a sum of few levels: a weight each would take most of them."""
    norm = masking.clip_norm
    if isinstance(job.privacy, DistributedLevel) or masking.ring_bits > ROTATED_UP_TO or norm is None:
        return
    if job.aggregation.weighting != "uniform":
        raise PrivacyError(
            f"privacy.ring_bits = {masking.ring_bits} with aggregation.weighting = "
            f'"{job.aggregation.weighting}": an integer of so few bits has no room for the examples of each '
            'silo; set aggregation.weighting = "uniform", or leave ring_bits out'
        )
    size = most_summed(job)
    if size is not None:
        room = size if masking.group_size is None else largest_group(masking.group_size, size)
        Quantiser(masking.ring_bits, room, 1, norm)


def sums_exactly(job: JobConfig) -> bool:
    """Whether rounds reveal sums without noise: two sums from the same model reveal their difference."""
    return isinstance(job.privacy, NoPrivacy) and job.privacy.secure_aggregation


def fewest(job: JobConfig) -> int:
    """Computes how many clients a round needs to begin: fewer would not hide each other's updates."""
    masking = masking_of(job.privacy)
    return 0 if masking is None else max(MINIMUM_COHORT, fewest_groups(job) * (masking.group_size or 0))


def fewest_updates(job: JobConfig, size: int) -> int:
    """Computes how many clients of a cohort of `size` must answer to the end to unmask its sum."""
    masking = masking_of(job.privacy)
    if masking is None:
        return 0
    if masking.group_size is not None:
        return fewest_groups(job) * MINIMUM_COHORT
    return max(MINIMUM_COHORT, 2 * size // 3 + 1, fewest_survivors(job, size), _fewest_shares(job))


def fewest_groups(job: JobConfig) -> int:
    """Computes how many groups the rule needs: more than two for each hostile silo; 0 without groups."""
    masking = masking_of(job.privacy)
    if masking is None or masking.group_size is None:
        return 0
    return max(FEWEST_GROUPS, 2 * int(job.aggregation.parameters.get("f", 0)) + 1)


def least_of_groups(job: JobConfig, cohort: int) -> Least:
    """Computes what must be left of a cohort of so many in groups: for the rule, and for the quorum."""
    return Least(fewest_groups(job), max(quorum(job.cohort, cohort), fewest_updates(job, cohort)))


def most_bytes(job: JobConfig, sent: Layout) -> int:
    """The most bytes that a silo sends up in a round, for updates of this layout; as float32 where code of
    others writes them."""
    if masking_of(job.privacy) is not None:
        return max(_round(job, sent, number).upload_bytes for number in (1, 2))
    chains = [chain for chain in job.transfer.chains if not foreign_stages(chain)]
    sizes = [get_encoding(chain).over(sent).size_bound(sent.size) for chain in chains]
    return max(sizes, default=4 * sent.size)


def _round(job: JobConfig, sent: Layout, number: int) -> SecureRound:
    """A round of `cohort.size` silos, or of as many as are simulated where the job names no size."""
    silos = most_summed(job) or job.simulation.clients
    return SecureRound.of(job, values_masked(job, sent, number), silos, number)


def secure_summary(job: JobConfig, sent: Layout) -> str:
    """What a job's secure aggregation promises, in words, with its failure probabilities; "" without it.

    `sent` is the layout of an update.
    """
    masking = masking_of(job.privacy)
    if masking is None:
        return ""
    round = _round(job, sent, 1)
    parameters, text = round.parameters, f"{round.parameters.summary()}; {_precision(round)}"
    if job.common_rank is not None:
        even = _round(job, sent, 2).upload_bytes
        text += f"; these are factors of {sent.size:,} values, and in even rounds {even:,} bytes"
    if masking.group_size is None:
        return text
    silos = most_summed(job) or job.simulation.clients
    count = silos // masking.group_size
    many = int(silos * (1 / 3 if masking.corruption is None else masking.corruption))
    chance = 2 ** overrun(silos, many, masking.group_size, parameters.corrupt)
    hostile = job.aggregation.parameters.get("f", (count - 1) // 2)
    return (
        f"{text}; {silos} silos make {count} groups, and the coordinator sees the sum of each: the rule "
        f"withstands {hostile} hostile silos. Secrecy holds for certain against {parameters.corrupt} "
        f"colluding silos; with {many} of {silos}, some group holds more than that with probability "
        f"{chance:.2g}"
    )


_FEW = 100
"""Examples of a silo for which the summary says how coarse a mean by examples is."""


def _precision(round: SecureRound) -> str:
    """What a silo sends, and how far off rounding leaves the mean."""
    sent = f"a silo sends {round.upload_bytes:,} bytes a round"
    if round.noise is not None:
        return f"{sent}, of {round.parameters.ring_bits} bits a number"
    quantiser, parameters = round.quantiser, round.parameters
    error = quantiser.expected_error(round.values, parameters.n) * (
        round.sample.factor if round.sample else 1
    )
    turned = ", after a public random rotation" if round.rotation else ""
    if round.sample is not None:
        turned += f", for {round.values:,} of {round.columns:,} values, the same for all silos"
    weights, fewer = "" if round.uniform else f" and weights of {parameters.weight_bound}", ""
    if not round.uniform and parameters.weight_bound > _FEW:
        fewer = (
            f"; {parameters.weight_bound / _FEW:,.0f} times as far where silos have {_FEW} examples each: "
            'where they have few, set aggregation.weighting = "uniform"'
        )
    return (
        f"{sent}: {parameters.ring_bits} bits a number{turned}, {quantiser.top:,} levels on either side of "
        f"zero; rounding puts the mean of all {parameters.n}{weights} off by at most {error:.2g} in L2 norm "
        f"({error / parameters.clip_norm:.2g} of clip_norm){fewer}"
    )


def _fewest_shares(job: JobConfig) -> int:
    """Computes how many shares of noise make up the promised noise; a sum with fewer must not be unmasked."""
    if not isinstance(job.privacy, DistributedLevel) or most_summed(job) is None:
        return 0
    return shared_noise(job, 1.0, 1).survivors


def _check_groups(job: JobConfig, aggregation: AggregationConfig, size: int) -> None:
    if aggregation.rule == "mean":
        raise PrivacyError(
            f'privacy.group_size = {size} with aggregation.rule = "mean": groups tell more than one sum, and '
            "a mean of them withstands nobody; choose a robust rule, or leave group_size out"
        )
    follows = aggregation.takes("history") or aggregation.takes("root_update")
    if "pivot" in aggregation.parameters or follows:
        raise PrivacyError(
            f"aggregation.rule = {aggregation.rule!r} follows single silos, and what it would see are means "
            "of groups, which change from round to round; choose a rule that takes each round by itself"
        )
    hostile, groups = int(aggregation.parameters.get("f", 0)), fewest_groups(job)
    if hostile > size - 2:
        raise PrivacyError(
            f"privacy.group_size = {size} with f = {hostile}: all hostile silos could be in one group, and "
            f"would leave nobody to hide among; use groups of at least {hostile + 2}"
        )
    if job.cohort.size is not None and job.cohort.size // size < groups:
        raise PrivacyError(
            f"cohort.size = {job.cohort.size} makes {job.cohort.size // size} groups of {size} "
            f"(privacy.group_size), and f = {hostile} takes at least {groups}: each hostile silo may spoil "
            f"one. Ask at least {groups * size} silos"
        )


def _check_secure_rounds(job: JobConfig) -> None:
    cohort = job.cohort
    size, key = most_summed(job), "round.buffer" if job.round.mode == "buffered" else "cohort.size"
    if size is not None and size < MINIMUM_COHORT:
        raise PrivacyError(
            f"{key} = {size}: a sum of fewer than {MINIMUM_COHORT} silos hides none of them; "
            "leave secure_aggregation out, or ask more silos"
        )
    if cohort.over_selection != 1.0:
        raise PrivacyError(
            "cohort.over_selection: whoever is not waited for counts as a dropout of secure aggregation; "
            "leave it at 1"
        )
    if cohort.strategy == "data_size":
        raise PrivacyError(
            'cohort.strategy = "data_size": example counts stay hidden under secure aggregation'
        )
    if why := why_not_masked(job):
        raise PrivacyError(why)
