"""Selection strategies of others: an installed package's, or a file's beside the job.

Such a strategy is a function `(names, size, chance, lookup, **parameters) → names`, or a `SelectionStrategy`,
which declares more. No accountant amplifies by it, whatever it does: that takes `uniform` or `poisson`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from roundtable.core.config import JobConfig
from roundtable.core.errors import ConfigError, PrivacyError
from roundtable.core.job_tables.cohort_table import CohortTable
from roundtable.core.plugins.calls import as_function, check_call, check_parameters, foreign_call, named_at
from roundtable.core.plugins.doors import resolve
from roundtable.core.privacy_table import NoPrivacy, OwnNoise, masking_of
from roundtable.engine.selection import BY_LOSS, STRATEGIES, Candidate, Lookup, SelectionFailed, Strategy

ENTRY_POINT_GROUP = "roundtable.selection_strategies"
_KIND = "selection strategy"
_ARGUMENTS = ("names", "size", "chance", "lookup")
_PARAMETERS = ("cohort", "parameters")


@dataclass(frozen=True)
class SelectionStrategy:
    """A strategy that declares what it looks at.

    function: chooses `size` of `names` by the generator `chance` alone; `lookup(name)` tells what is known
    of a client. blind: it needs neither example counts nor who has answered, and gets neither. Only such a
    strategy goes together with privacy levels and secure aggregation, under which both would tell of silos'
    data.
    """

    function: Callable[..., Sequence[str]]
    blind: bool = False


@dataclass(frozen=True)
class ForeignStrategy:
    """Somebody else's strategy with the job's parameters, whose every choice is checked."""

    name: str
    declared: SelectionStrategy
    parameters: Mapping[str, Any]

    def __call__(
        self,
        names: Sequence[str],
        size: int,
        chance: np.random.Generator,
        lookup: Lookup,
        cohort: CohortTable,
    ) -> list[str]:
        """The names chosen. Raises SelectionFailed for anything but `size` different ones of `names`."""
        reference, function = f"{_KIND} {self.name!r}", self.declared.function
        seen = (lambda name: _blinded(lookup(name))) if self.declared.blind else lookup
        with foreign_call(reference, function, SelectionFailed):
            chosen = list(function(list(names), size, chance, seen, **self.parameters))
        known = set(names)
        strange = [name for name in chosen if not isinstance(name, str) or name not in known]
        if strange or len(set(chosen)) != len(chosen) or len(chosen) != size:
            what = (
                f"{strange[0]!r}, which cannot be chosen" if strange else f"{len(set(chosen))} different ones"
            )
            raise SelectionFailed(
                f"{reference}: {size} of {len(names)} clients are wanted, and it gave {what}"
            )
        return chosen


def find_strategy(cohort: CohortTable, folder: Path | None = None) -> Strategy:
    """The strategy that `[cohort]` names; `file.py:function` is looked for in `folder`, refused without one.

    Raises ConfigError where there is none, what is there is none, or the parameters are not its own.
    """
    name, reference = cohort.strategy, f"{_KIND} {cohort.strategy!r}"
    if name in STRATEGIES:
        if cohort.parameters:
            raise ConfigError(f"{reference} is built in and takes no parameters", key=_PARAMETERS)
        return STRATEGIES[name]
    with named_at("cohort", "strategy"):
        definition = resolve(_KIND, name, STRATEGIES, ENTRY_POINT_GROUP, folder)
        if isinstance(definition, SelectionStrategy):
            check_call(reference, definition.function, _ARGUMENTS)
            declared = definition
        else:
            declared = SelectionStrategy(as_function(_KIND, name, definition, _ARGUMENTS))
    check_parameters(reference, declared.function, cohort.parameters, skip=len(_ARGUMENTS), table=_PARAMETERS)
    return ForeignStrategy(name, declared, cohort.parameters)


_TIMED = (
    "who is late then depends on how long other rounds took, at silos whose work depends on their data, and "
    "this level's guarantee rests on the opposite; leave it out"
)


def check_strategy(job: JobConfig, strategy: Strategy) -> None:
    """Raises PrivacyError where somebody else's strategy may look at what the job's privacy hides."""
    private = not isinstance(job.privacy, NoPrivacy) or masking_of(job.privacy) is not None
    if private and job.cohort.strategy in BY_LOSS:
        raise PrivacyError(
            f"cohort.strategy = {job.cohort.strategy!r} chooses by the losses that silos tell, which privacy "
            'levels and secure aggregation hide; choose "uniform", "reliability" or another strategy'
        )
    if job.cohort.balance == "directions":
        _check_directions(job, private)
    free = isinstance(job.privacy, NoPrivacy | OwnNoise) and masking_of(job.privacy) is None
    if job.cohort.deadline_percentile is not None and not free:
        raise PrivacyError(f"cohort.deadline_percentile: {_TIMED}")
    if private and isinstance(strategy, ForeignStrategy) and not strategy.declared.blind:
        raise PrivacyError(
            f"cohort.strategy = {strategy.name!r} may choose by how many examples silos have and who has "
            f"answered, "
            "which privacy levels and secure aggregation hide; use one that is declared as "
            "SelectionStrategy(function, blind=True), or a built-in one"
        )


def _check_directions(job: JobConfig, private: bool) -> None:
    """What hides single updates, or makes those of two rounds incomparable."""
    key = 'cohort.balance = "directions"'
    if private:
        raise PrivacyError(
            f"{key} compares single updates, which privacy levels and secure aggregation hide; balance by "
            'what silos declare: "value" or "histogram", with a label'
        )
    if job.transfer.memory.way == "ef21" or job.common_rank is not None:
        which = "transfer.feedback" if job.transfer.memory.way == "ef21" else "transfer.up"
        raise ConfigError(
            f"{key} compares what silos have sent in different rounds, and with this {which} that are no "
            "updates: differences from what was sent before, or factors by each round's own basis; "
            "balance by what is declared",
            key=("cohort", "balance"),
        )


def _blinded(candidate: Candidate) -> Candidate:
    """What does not depend on a client's data: who it is, what is declared of it, when it was asked."""
    info = replace(candidate.info, examples=None, completed=candidate.info.selected)
    return replace(candidate, info=info, completed=candidate.selected, loss=None, seconds=None, direction="")
