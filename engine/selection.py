"""Who takes part in a round: each strategy a small pure function over what is known of the clients.

All take the names that can be chosen, in a fixed order, and a seeded generator, and give the chosen
names; the same generator gives the same choice. Only `uniform` and `poisson` choose independently
of the clients' properties: privacy accountants can amplify by them, and by no other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import median

import numpy as np

from roundtable.core.config import JobConfig
from roundtable.core.errors import RoundtableError
from roundtable.core.job_tables.cohort_table import CohortTable
from roundtable.core.privacy_table import groups_of, has_secret_cohorts
from roundtable.core.seeds import derive_seed
from roundtable.engine.clients import ClientInfo
from roundtable.engine.diverse_groups import by_direction, by_histogram, by_value
from roundtable.engine.population import Population
from roundtable.engine.state import ClientRecord, EngineState


@dataclass(frozen=True)
class Candidate:
    """What a strategy may know of a client. Counts are over the job's past rounds.

    `loss` is the mean training loss that it told last, `seconds` what its last update took, without time in
    line at it; None where not known. `direction` is the sketch of its last update that is in a model, where
    the job keeps that, else "".
    """

    info: ClientInfo
    selected: int = 0
    completed: int = 0
    last_round: int = 0
    loss: float | None = None
    seconds: float | None = None
    direction: str = ""

    @classmethod
    def of(cls, info: ClientInfo, record: ClientRecord | None) -> Candidate:
        """Of a client and the job's record of it, None where it was never asked."""
        if record is None:
            return cls(info)
        if record.examples is not None:
            info = replace(info, examples=record.examples)
        told = (record.loss, record.seconds, record.direction)
        return cls(info, record.selected, record.completed, record.last_round, *told)

    @property
    def reliability(self) -> float:
        """Estimated probability of answering, over all jobs: (completed + 1) / (selected + 1); 1 if new."""
        completed, selected = self.completed + self.info.completed, self.selected + self.info.selected
        return min(1.0, (completed + 1) / (selected + 1))


class SelectionFailed(RoundtableError):
    """A strategy that cannot choose, or chooses whom it may not."""


Lookup = Callable[[str], Candidate]
Strategy = Callable[[Sequence[str], int, np.random.Generator, Lookup, CohortTable], list[str]]


def uniform(
    names: Sequence[str], size: int, chance: np.random.Generator, lookup: Lookup, cohort: CohortTable
) -> list[str]:
    """`size` clients without replacement, each subset equally likely (McMahan et al. 2017, Algorithm 1)."""
    picks = chance.choice(len(names), size=size, replace=False, shuffle=False)
    return [names[int(i)] for i in picks]


def poisson(
    names: Sequence[str], size: int, chance: np.random.Generator, lookup: Lookup, cohort: CohortTable
) -> list[str]:
    """Each client independently with the job's `probability`; the cohort may be empty. `size` is not used.

    Draws the binomial size first and then a uniform subset of that size, which is the same
    distribution in time proportional to the cohort instead of the population.
    """
    assert cohort.probability is not None
    count = int(chance.binomial(len(names), cohort.probability))
    return uniform(names, count, chance, lookup, cohort)


def data_size(
    names: Sequence[str], size: int, chance: np.random.Generator, lookup: Lookup, cohort: CohortTable
) -> list[str]:
    """Without replacement, with probabilities proportional to the examples that a client has.

    A client whose count is not known yet counts as the median of those known, which no one of them moves far.
    """
    return _weighted(names, size, chance, _typical([lookup(name).info.examples for name in names]))


def reliability(
    names: Sequence[str], size: int, chance: np.random.Generator, lookup: Lookup, cohort: CohortTable
) -> list[str]:
    """Without replacement, with probabilities proportional to the share of past rounds that were answered."""
    return _weighted(names, size, chance, [lookup(name).reliability for name in names])


def diversity(
    names: Sequence[str], size: int, chance: np.random.Generator, lookup: Lookup, cohort: CohortTable
) -> list[str]:
    """As equal a number as possible from each group of clients that declare alike, uniform within one.

    A group are those with the same value under the metadata key `label`; with `balance = "histogram"` it
    holds counts of labels, and those with close mixtures are a group, of which there are as many as clients
    are wanted at most. Clients that declare nothing under that key form a group of their own. With `balance =
    "directions"` a group are those whose last updates pointed the same way, as many groups at most.
    """
    known = [lookup(name) for name in names]
    infos = [each.info for each in known]
    if cohort.balance == "directions":
        groups = by_direction([each.direction for each in known], size, chance)
    elif cohort.balance == "histogram":
        groups = by_histogram(infos, cohort.label or "", size, chance)
    else:
        groups = by_value(infos, cohort.label or "")
    left = [[group[int(i)] for i in chance.permutation(len(group))] for group in groups]
    left = [left[int(i)] for i in chance.permutation(len(left))]
    chosen: list[str] = []
    while len(chosen) < size:
        for group in left:
            if group and len(chosen) < size:
                chosen.append(names[group.pop()])
    return chosen


_SHOWN_KEYS = 10
"""Of labels that silos declare, in a reason: there may be a hundred of each silo."""


def undeclared(cohort: CohortTable, declared: Iterable[Mapping[str, str]]) -> str | None:
    """Why silos that declare this cannot be balanced by the cohort's label; None where one declares it."""
    if cohort.label is None:
        return None
    keys: set[str] = set()
    for metadata in declared:
        if metadata.get(cohort.label):
            return None
        keys.update(metadata)
    more = f" and {len(keys) - _SHOWN_KEYS} more" if len(keys) > _SHOWN_KEYS else ""
    shown = ", ".join(map(repr, sorted(keys)[:_SHOWN_KEYS]))
    said = f"they declare {shown}{more}" if keys else "they declare nothing"
    return (
        f"cohort.label = {cohort.label!r}: no silo declares it ({said}); name a label that silos have in "
        "[metadata] of their agent.toml, or have them declare this one"
    )


def round_robin(
    names: Sequence[str], size: int, chance: np.random.Generator, lookup: Lookup, cohort: CohortTable
) -> list[str]:
    """Those whose last round is longest ago, ties in the order of names."""
    return sorted(names, key=lambda name: (lookup(name).last_round, name))[:size]


def power_of_choice(
    names: Sequence[str], size: int, chance: np.random.Generator, lookup: Lookup, cohort: CohortTable
) -> list[str]:
    """Those with the highest losses among `cohort.candidates` drawn by data size (Cho et al. 2020, π_rpow-d).

    The loss is what a client told with its last update; one that was never asked goes before all others.
    """
    drawn = data_size(
        names, min(len(names), max(size, cohort.candidates or 2 * size)), chance, lookup, cohort
    )
    known = [lookup(name) for name in drawn]
    losses = _typical([each.loss for each in known])
    ranked = [math.inf if not each.completed else loss for each, loss in zip(known, losses, strict=True)]
    order = sorted(range(len(drawn)), key=lambda i: -ranked[i])
    return [drawn[i] for i in order[:size]]


OORT_EXPLORATION, OORT_DECAY, OORT_LEAST = 0.9, 0.98, 0.2
OORT_CUT, OORT_CLIP, OORT_STRAGGLER, OORT_STALENESS = 0.95, 0.95, 2.0, 0.1
OORT_MOST = 1e300


def oort(
    names: Sequence[str], size: int, chance: np.random.Generator, lookup: Lookup, cohort: CohortTable
) -> list[str]:
    """Guided selection (Lai et al. 2021, "Oort", Algorithm 1): most of a cohort by utility, a part untried.

    The utility of a client that has answered is examples × |loss|, in the place of examples × the root mean
    square of its losses, which no silo tells; clipped at the 95th percentile (of fewer than twenty: at the
    largest but one, so that what one silo tells hides no other) and divided by the largest; plus
    √(0.1 · ln R / L), R being the round and L its last; times (T / t)² where its time t is above T, the
    median of the times that are known (the paper's pacer moves T). Who lies above 95% of the last one that
    would be taken is drawn by utility. The share of untried ones is 0.9 · 0.98^(R-1), at least 0.2; nobody's
    speed is known before, so they are drawn by their reliability over all jobs.
    """
    known = [lookup(name) for name in names]
    tried = [i for i, each in enumerate(known) if each.completed]
    fresh = [i for i, each in enumerate(known) if not each.completed]
    round = 1 + max((each.last_round for each in known), default=0)
    share = max(OORT_LEAST, OORT_EXPLORATION * OORT_DECAY ** (round - 1))
    new = min(len(fresh), max(size - len(tried), math.ceil(share * size)))
    chosen = _weighted([names[i] for i in fresh], new, chance, [known[i].reliability for i in fresh])
    if new < size:
        utility = _utilities([known[i] for i in tried], round)
        cut = OORT_CUT * np.sort(utility)[-(size - new)]
        above = [place for place, value in enumerate(utility) if value >= cut]
        weights = [float(utility[place]) for place in above]
        chosen += _weighted([names[tried[place]] for place in above], size - new, chance, weights)
    return chosen


def _utilities(tried: Sequence[Candidate], round: int) -> np.ndarray:
    counts = np.array(_typical([each.info.examples for each in tried]))
    losses = np.abs(_typical([each.loss for each in tried]))
    with np.errstate(over="ignore"):
        value = np.minimum(counts * losses, OORT_MOST)
    value = np.minimum(value, np.quantile(value, OORT_CLIP, method="lower"))
    value = value / max(float(value.max()), 1e-12)
    value = value + np.sqrt(
        OORT_STALENESS * math.log(round) / np.maximum([each.last_round for each in tried], 1)
    )
    times = np.array(_typical([each.seconds for each in tried]))
    preferred = float(np.median(times))
    slow = times > preferred
    value[slow] *= (preferred / times[slow]) ** OORT_STRAGGLER
    return np.asarray(value)


STRATEGIES: Mapping[str, Strategy] = {
    "uniform": uniform,
    "poisson": poisson,
    "data_size": data_size,
    "reliability": reliability,
    "diversity": diversity,
    "round_robin": round_robin,
    "power_of_choice": power_of_choice,
    "oort": oort,
}
BY_LOSS = ("power_of_choice", "oort")
"""Strategies that need what silos tell of their training."""


def is_amplified(job: JobConfig) -> bool:
    """Whether an accountant relies on a draw that is secret and made from the whole population.

    What a round then publishes may not depend on who of its cohort has answered.
    """
    cohort = job.cohort
    sampled = cohort.strategy == "poisson" or (cohort.strategy == "uniform" and cohort.size is not None)
    return has_secret_cohorts(job.privacy) and sampled


def in_turn(names: Sequence[str], job: JobConfig, state: EngineState, round: int) -> Sequence[str]:
    """Those of the group whose turn round `round` (from 1) is; all where the job's silos are not divided.

    A silo's group follows from its name and the job's secret seed alone: it is the same in every round and
    after a restart, and whether other silos are there does not change it.
    """
    groups = groups_of(job.privacy)
    if groups == 1:
        return names
    return _divided(tuple(names), state.selection_seed, groups)[(round - 1) % groups]


@lru_cache(maxsize=4)
def _divided(names: tuple[str, ...], seed: int, groups: int) -> tuple[tuple[str, ...], ...]:
    """Kept: a simulation may have millions of names, and looks at them in every round."""
    divided: tuple[list[str], ...] = tuple([] for _ in range(groups))
    for name in names:
        divided[derive_seed(seed, "group", name) % groups].append(name)
    return tuple(map(tuple, divided))


def begins_apart(job: JobConfig, state: EngineState, round: int) -> bool:
    """Whether clients are chosen for round `round`: within regions they stay, from the first round to that
    which goes up, as a relay keeps its silos."""
    return state.regional or job.regions.first(round) == round


def stayed(job: JobConfig, state: EngineState, round: int) -> list[str]:
    """Those who were chosen for the first of the rounds within regions that round `round` is one of."""
    first = job.regions.first(round)
    return sorted(name for name, record in state.clients.items() if record.last_round == first)


def quorum(cohort: CohortTable, size: int) -> int:
    """Updates without which a round of `size` fails: as stated, or more than half; Poisson allows none."""
    if cohort.strategy == "poisson":
        return min(cohort.minimum or 0, size)
    return min(cohort.minimum, size) if cohort.minimum is not None else size // 2 + 1


def least_for_selection(cohort: CohortTable, settled: bool, population: Population) -> int:
    """How many clients must be there to draw a cohort; `settled` once the time to wait for all has passed.

    Until then as many as its size, less those whom it would take that are held: waiting brings them not back.
    """
    if cohort.strategy == "poisson":
        return max(1, cohort.minimum or 0)
    least = max(1, cohort.minimum if cohort.minimum is not None else quorum(cohort, cohort.size or 1))
    if settled or cohort.size is None:
        return least
    spare = max(0, len(population.known()) - cohort.size)
    return max(least, cohort.size - max(0, len(population.held()) - spare))


def rested(names: Sequence[str], state: EngineState) -> Sequence[str]:
    """Those of whom no update entered a model within the last `separation` − 1 rounds.

    DP-FTRL's sensitivity rests on it, in every attempt; an attempt that failed published nothing, and
    who took part in it alone may come again at once.
    """
    if state.separation <= 1:
        return names
    recent = {name for contributors in state.summary.recent for name in contributors}
    return [name for name in names if name not in recent] if recent else names


def _typical(values: Sequence[float | int | None]) -> list[float]:
    """The values; the median of the others where one is not known, 1 where none is."""
    known = [float(value) for value in values if value is not None]
    typical = median(known) if known else 1.0
    return [typical if value is None else float(value) for value in values]


def _weighted(
    names: Sequence[str], size: int, chance: np.random.Generator, weights: list[float]
) -> list[str]:
    """Successive draws without replacement (Efraimidis and Spirakis 2006: the largest u^(1/w), in logs)."""
    with np.errstate(divide="ignore"):
        keys = np.log(chance.random(len(names))) / np.maximum(np.array(weights), 1e-12)
    return [names[int(i)] for i in np.argsort(-keys, kind="stable")[:size]]
