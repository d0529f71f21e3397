"""What goes with sums by region: a region sends the mean of its updates, and nothing of a single one."""

from __future__ import annotations

from roundtable.core.algorithms.contract import ClientAlgorithm
from roundtable.core.config import AggregationTable, JobConfig, ServerOptimizerTable
from roundtable.core.encodings import get_encoding
from roundtable.core.encodings.assembly import foreign_stages
from roundtable.core.errors import ConfigError, PrivacyError
from roundtable.core.privacy_table import NoPrivacy, masking_of

RELAYS_SUM = "regions.sum: a relay sends one sum, and"
OWN_MODELS = "regions.rounds: until a round goes up each region has a model of its own, and"


def check_relayed_sums(job: JobConfig) -> None:
    """Raises ConfigError or PrivacyError, naming the key, for what no relay can add up or no sum can tell.

    Nothing for a job whose relays add nothing up.
    """
    if not job.regions.sum:
        return
    if (masking := masking_of(job.privacy)) is not None:
        # What the rule, the weights and the checks may be under masks holds here as well: a sum is a sum.
        if masking.group_size is not None:
            raise PrivacyError(
                f"{RELAYS_SUM} privacy.group_size wants one of each group, whose silos are in any region; "
                "leave one of the two out"
            )
        return
    check_sums(job, RELAYS_SUM)
    up = job.transfer.up
    dense = not job.transfer.automatic and not foreign_stages(up) and get_encoding(up).dense_dtype is not None
    if not dense:
        raise ConfigError(
            f"{RELAYS_SUM} transfer.up = {up!r} is more than a list of values, which is all that it reads; "
            'set "float32", "bfloat16" or "float16"',
            key=("transfer", "up"),
        )


def check_sums(job: JobConfig, needs: str) -> None:
    """Raises ConfigError or PrivacyError, naming the key, for what cannot be made of sums by region.

    `needs` is the beginning of each sentence: the key that asks for sums.
    """
    if masking_of(job.privacy) is not None:
        raise PrivacyError(
            f"{needs} masks change no bit of such a sum, and are not simulated there; leave out [privacy] or "
            "the regions"
        )
    if not isinstance(job.privacy, NoPrivacy):
        raise PrivacyError(
            f"{needs} clipping, noise and its account are not made for that; leave out [privacy] or the "
            "regions"
        )
    if job.round.mode == "buffered":
        raise ConfigError(
            f'{needs} round.mode = "buffered" takes updates one by one; leave one of the two out'
        )
    if job.transfer.memory.way == "ef21":
        raise ConfigError(
            f'{needs} transfer.feedback = "ef21" goes on from what each client has sent; set "on"'
        )
    if job.cohort.balance == "directions":
        raise ConfigError(
            f'{needs} cohort.balance = "directions" compares single updates; balance by what is declared: '
            '"value" or "histogram", with a label'
        )
    _check_rule(job.aggregation, needs)


def _check_rule(table: AggregationTable, needs: str) -> None:
    """What needs more than each region's mean."""
    checks = table.validation
    if table.rule != "mean" or table.pre:
        key = "aggregation.pre" if table.rule == "mean" else f"aggregation.rule = {table.rule!r}"
        raise ConfigError(f'{needs} {key} looks at single updates; set rule = "mean" without pre')
    if table.weighting not in ("examples", "uniform"):
        raise ConfigError(
            f"{needs} aggregation.weighting = {table.weighting!r} is not of the examples alone; set "
            '"examples" or "uniform"'
        )
    ratios = {"norm_ratio": checks.norm_ratio}
    if table.weighting == "examples":
        ratios["weight_ratio"] = checks.weight_ratio
    for key, value in ratios.items():
        if value != "off":
            raise ConfigError(
                f"{needs} aggregation.validation.{key} = {value:g} compares each update with the median "
                'of all regions; set it to "off"'
            )
    if checks.max_norm is not None:
        raise ConfigError(f"{needs} aggregation.validation.max_norm looks at single updates; leave it out")
    if table.diagnosis:
        raise ConfigError(f"{needs} aggregation.diagnosis compares single updates; set it to false")


def check_rounds_within(job: JobConfig, algorithm: ClientAlgorithm) -> None:
    """Raises ConfigError or PrivacyError, naming the key, for what cannot be where regions have models of
    their own between two rounds that go up."""
    if job.regions.rounds == 1:
        return
    if masking_of(job.privacy) is not None:
        raise PrivacyError(
            f"{OWN_MODELS} a masked sum is opened by the coordinator alone, so that no region has one; leave "
            "out secure aggregation, or set rounds = 1"
        )
    if algorithm.places or algorithm.server() is not None:
        raise ConfigError(
            f"{OWN_MODELS} algorithm.name = {job.algorithm.name!r} keeps something beside the one global "
            "model; use fedavg or fedprox, or set rounds = 1"
        )
    if job.aggregation.server_optimizer != ServerOptimizerTable():
        raise ConfigError(
            f"{OWN_MODELS} aggregation.server_optimizer takes a step from one global model; leave it out, or "
            "set rounds = 1"
        )
    if job.transfer.down != "float32":
        raise ConfigError(
            f"{OWN_MODELS} transfer.down = {job.transfer.down!r} encodes the change of one global model; set "
            '"float32", or rounds = 1'
        )
