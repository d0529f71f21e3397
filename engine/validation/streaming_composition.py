"""What rounds that send one fragment of the model do not go together with; refused before round 1."""

from __future__ import annotations

from pathlib import Path

from roundtable.aggregation import find_rule
from roundtable.aggregation.foreign_optimizer import ForeignOptimizer
from roundtable.aggregation.optimizers import ServerOptimizer
from roundtable.core.algorithms.contract import ClientAlgorithm
from roundtable.core.config import JobConfig
from roundtable.core.encodings import get_encoding
from roundtable.core.errors import ConfigError


def check_fragments(
    job: JobConfig, algorithm: ClientAlgorithm, optimizer: ServerOptimizer, folder: Path | None = None
) -> None:
    """Raises ConfigError where a round would look at what is no part of its fragment."""
    stage, said = algorithm.table.stage(), f"algorithm {job.algorithm.name!r}"
    if not stage:
        return
    if job.transfer.behind(stage, job.algorithm.name) != job.transfer:
        raise ConfigError(
            f"{said} sends a model in fragments, and this job was read where its file is not, so [transfer] "
            "does not say so: load the job from its folder",
            key=("algorithm", "name"),
        )
    rule = find_rule(job.aggregation.rule, folder)
    if rule.takes("previous") or rule.takes("root_update"):
        raise ConfigError(
            f"aggregation.rule = {job.aggregation.rule!r} and {said}: the rule goes on from the last round's "
            "aggregate or compares with training of its own, and these are of other fragments; choose "
            "another rule",
            key=("aggregation", "rule"),
        )
    if job.cohort.balance == "directions":
        raise ConfigError(
            f'cohort.balance = "directions" and {said}: last updates of silos that were asked in different '
            "rounds are of different fragments, and say nothing of each other; choose another balance",
            key=("cohort", "balance"),
        )
    table = job.aggregation.server_optimizer
    if isinstance(optimizer, ForeignOptimizer):
        raise ConfigError(
            f"aggregation.server_optimizer: {table.name!r} may count steps or look at the whole model, and "
            f'{said} moves one fragment a round; choose "diloco" or another that is built in',
            key=("aggregation", "server_optimizer"),
        )
    transfer = job.transfer
    if transfer.automatic:
        raise ConfigError(
            f'transfer.up = "auto" and {said}: no encoding is chosen for each silo; name one, such as '
            '"int4(block=128)"',
            key=("transfer", "up"),
        )
    for way, chain in (("up", transfer.up), ("down", transfer.down)):
        if get_encoding(chain, folder).keeps:
            raise ConfigError(
                f"transfer.{way} = {chain!r}: it keeps something from update to update, and the next one is "
                "of another fragment; set warm=false",
                key=("transfer", way),
            )
    if transfer.memory.way == "ef21" or transfer.momentum:
        raise ConfigError(
            f"transfer.feedback = {transfer.feedback!r}, transfer.momentum = {transfer.momentum} and {said}: "
            "what is remembered for them goes on in each round, and a fragment has its turn in one of many; "
            'set feedback = "on" or "off", without momentum',
            key=("transfer", "feedback"),
        )
