"""From a round's updates to one vector: validate, pre-aggregate, apply the rule, check, explain."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch

from roundtable.aggregation.conditions import NotFinite
from roundtable.aggregation.diagnosis import Diagnosis, contributions, pairwise
from roundtable.aggregation.influence import sampled_shares
from roundtable.aggregation.preaggregation import PRE_AGGREGATIONS, PreAggregation, find_pre_aggregation
from roundtable.aggregation.registry import RULES, Rule, RuleResult, find_rule
from roundtable.aggregation.rows.device_rows import DeviceRows, gpu, pays
from roundtable.aggregation.rows.gram import gram
from roundtable.aggregation.rows.matrix import UpdateMatrix
from roundtable.aggregation.stages import RuleContext, Stages
from roundtable.aggregation.taking import ColumnSink, Taking
from roundtable.aggregation.validation import (
    ClientRow,
    Exclusion,
    Screening,
    ValidationPolicy,
    screen,
)
from roundtable.aggregation.weighting import Weighting, capped_clients, row_weights
from roundtable.core.errors import AggregationError, ConfigError


@dataclass(frozen=True)
class AggregationConfig:
    """The `[aggregation]` table of a job file.

    rule, parameters: a rule by name. pre: steps in front of it, in order; a step that needs `f` and is given
    none takes the rule's. weighting: what a mean weighs by; robust rules count every silo once whatever it
    claims. weights: by silo name, for `custom`. validation: what becomes of an update that is broken or
    longer than max_norm. weight_ratio: most that a silo's examples count, in medians of the round; None for
    no cap. norm_ratio: largest norm in medians of the round, of a mean without steps alone: robust rules
    judge outliers themselves, and must not lose rows that they count on. folder: where rules and
    steps named as file.py:Object are; None refuses such names. device: where built-in rules but the mean work
    on WORTH_MOVING values or more; what a GPU adds up has other last digits.
    Raises ConfigError for names or parameters that do not exist.
    """

    rule: str = "mean"
    parameters: Mapping[str, Any] = field(default_factory=dict)
    pre: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    weighting: Weighting = "examples"
    weights: Mapping[str, float] = field(default_factory=dict)
    validation: ValidationPolicy = "exclude"
    max_norm: float | None = None
    weight_ratio: float | None = None
    norm_ratio: float | None = None
    folder: Path | None = None
    device: Literal["cpu", "cuda"] = "cpu"

    def __post_init__(self) -> None:
        self.definition.check(self.parameters)
        for (step, parameters), (name, given) in zip(self.steps, self.pre, strict=True):
            step.check(given)
            if step.takes("f") and "f" not in parameters:
                raise ConfigError(
                    f"pre-aggregation {name!r} needs f: the number of byzantine silos to withstand"
                )
        for key, value, known in (
            ("weighting", self.weighting, get_args(Weighting)),
            ("validation", self.validation, get_args(ValidationPolicy)),
        ):
            if value not in known:
                raise ConfigError(f"aggregation {key} must be one of {', '.join(known)}, not {value!r}")
        if self.max_norm is not None and not 0 < self.max_norm < math.inf:
            raise ConfigError(f"aggregation max_norm must be a positive number, not {self.max_norm!r}")
        if (self.weighting == "custom") != bool(self.weights):
            raise ConfigError('aggregation weights go with weighting = "custom", and custom needs them')

        if self.device == "cuda":
            self._check_device()

    def _check_device(self) -> None:
        if self.rule == "mean" and not self.pre:
            raise ConfigError(
                'aggregation.device = "cuda" with rule = "mean": updates take longer to reach a GPU than to '
                'be added up; leave device = "cpu"',
                key=("aggregation", "device"),
            )
        own = [name for name in (self.rule,) if name not in RULES]
        own += [name for name, _ in self.pre if name not in PRE_AGGREGATIONS]
        if own:
            raise ConfigError(
                f'aggregation.device = "cuda" with {own[0]!r}: rules and pre-aggregations that are not built '
                'in read rows in the memory of the host; leave device = "cpu"',
                key=("aggregation", "device"),
            )

    @cached_property
    def definition(self) -> Rule:
        """The rule that is named."""
        return find_rule(self.rule, self.folder)

    @cached_property
    def steps(self) -> tuple[tuple[PreAggregation, dict[str, Any]], ...]:
        """The pre-aggregations with their parameters, and the rule's f where one needs it and has none."""
        named = ((find_pre_aggregation(name, self.folder), given) for name, given in self.pre)
        return tuple((step, {**self._rules_f(step), **given}) for step, given in named)

    def _rules_f(self, step: PreAggregation) -> dict[str, Any]:
        return {"f": self.parameters["f"]} if step.takes("f") and "f" in self.parameters else {}

    def takes(self, provided: str) -> bool:
        """Whether the rule looks at something beside the round's updates: previous, root_update, history."""
        return self.definition.takes(provided)

    @property
    def relative_norm(self) -> float | None:
        """`norm_ratio` where it is looked at: a mean alone."""
        return self.norm_ratio if self.rule == "mean" and not self.pre else None

    @property
    def needs_gram(self) -> bool:
        """Whether a round measures the Gram matrix of its updates."""
        return self.definition.needs_gram or any(step.needs_gram for step, _ in self.steps)


@dataclass(frozen=True)
class AggregationResult:
    """The outcome of a round.

    vector: [d], empty where it went to a sink. weights: share of each client's update in it, where the rule
    is a mean of rows or the diagnosis was asked for, else empty. excluded: whose update was left out, why.
    """

    vector: torch.Tensor
    weights: Mapping[str, float]
    excluded: tuple[Exclusion, ...]
    diagnosis: Diagnosis


def aggregate(
    matrix: UpdateMatrix,
    clients: Sequence[ClientRow],
    config: AggregationConfig,
    seed: int = 0,
    out: torch.Tensor | None = None,
    *,
    context: RuleContext | None = None,
    diagnose: bool = False,
    sink: ColumnSink | None = None,
) -> AggregationResult:
    """Aggregates a round's updates; row i of `matrix` is the update of `clients[i]`.

    Rows are taken in the order of the clients' names, so the order of arrival changes nothing. Updates that
    are not finite never reach a rule: they are left out and lower the rule's f, and more of them than f is an
    error. `seed` is the round's. The vector is float32 (float64 for a float64 matrix), in `out` where given;
    a `sink` takes it block by block instead, so that it need not fit in memory.
    Raises AggregationError where no sound answer exists, InvalidUpdate where the validation policy says fail.
    """
    if len(clients) != matrix.rows:
        raise AggregationError(
            f"{matrix.rows} rows of updates and {len(clients)} clients: they must be one to one"
        )
    context = context or RuleContext()
    order = sorted(range(len(clients)), key=lambda index: clients[index].name)
    if order != list(range(len(clients))):
        matrix, clients, context = _select(matrix, clients, context, order)
    taking = Taking(matrix.device, out, sink)
    if config.device == "cuda" and pays(matrix):
        matrix = DeviceRows(matrix, gpu())
    if _can_trust(config, clients, diagnose):
        try:
            return _aggregate(matrix, clients, config, seed, taking, context, diagnose, trusting=True)
        except NotFinite:
            pass  # The second time every row is measured first, which says whose update it was.
    return _aggregate(matrix, clients, config, seed, taking, context, diagnose, trusting=False)


def _can_trust(config: AggregationConfig, clients: Sequence[ClientRow], diagnose: bool) -> bool:
    """Whether a pass that looks for broken rows can be saved: nothing else needs norms, and the rule itself
    notices a value that is not finite."""
    measured = all(client.norm is not None for client in clients)
    bounded = config.max_norm is not None or config.relative_norm is not None
    return config.definition.reads_all and not (config.pre or diagnose or measured or bounded)


def _aggregate(
    matrix: UpdateMatrix,
    clients: Sequence[ClientRow],
    config: AggregationConfig,
    seed: int,
    taking: Taking,
    context: RuleContext,
    diagnose: bool,
    trusting: bool,
) -> AggregationResult:
    pairs = config.needs_gram or diagnose
    weighted = config.definition.weighted
    by_loss = weighted and config.weighting == "inverse_loss"
    screening = screen(
        matrix,
        clients,
        config.validation,
        config.max_norm,
        pairs,
        trusting,
        by_loss,
        config.relative_norm,
    )
    if not screening.kept:
        raise AggregationError(_nothing_left(screening))
    if len(screening.kept) < matrix.rows:
        matrix, clients, context = _select(matrix, clients, context, screening.kept)
    names = tuple(client.name for client in clients)
    given = row_weights(clients, config.weighting if weighted else "uniform", config.weights)
    capped: tuple[Exclusion, ...] = ()
    if weighted and config.weighting == "examples" and config.weight_ratio is not None:
        given, capped = capped_clients(clients, given, config.weight_ratio)
    stages = Stages(matrix, given, seed, context, names, screening.faults)
    if screening.clipped:
        stages.mix(np.diag(screening.factors), keep_weights=True)
    for position, (step, parameters) in enumerate(config.steps):
        stages.prepare(position, step, parameters)
    used, result = stages.apply(config.definition, dict(config.parameters))
    vector = taking.all_of(result, config.rule, trusting)
    shares = _shares(config.definition, used, result, stages, matrix, pairs, diagnose)
    diagnosis = Diagnosis(
        rule=" + ".join([*(name for name, _ in config.pre), config.rule]),
        clients=names,
        excluded=screening.excluded,
        clipped=(*screening.clipped, *capped),
        details=result.details,
        **shares,
        **(pairwise(gram(matrix)) if pairs else {}),
    )
    weights = dict(zip(names, shares["influence"].tolist(), strict=True)) if shares else {}
    return AggregationResult(vector, weights, screening.excluded, diagnosis)


def _select(
    matrix: UpdateMatrix, clients: Sequence[ClientRow], context: RuleContext, indices: Sequence[int]
) -> tuple[UpdateMatrix, Sequence[ClientRow], RuleContext]:
    return matrix.select(indices), [clients[index] for index in indices], context.select(indices)


def _shares(
    rule: Rule,
    parameters: Mapping[str, Any],
    result: RuleResult,
    stages: Stages,
    matrix: UpdateMatrix,
    pairs: bool,
    diagnose: bool,
) -> dict[str, np.ndarray]:
    """Influence and, where it costs little or was asked for, contribution of each client; may be empty."""
    if result.influence is not None:
        influence = np.asarray(result.influence) @ stages.mixing
        known = {"influence": influence}
        return known | ({"contribution": contributions(gram(matrix), influence)} if pairs else {})
    if not diagnose or rule.kept is None:
        return {}
    sampled = sampled_shares(rule.kept, parameters, result, stages.matrix, matrix, stages.mixing)
    return dict(zip(("influence", "contribution"), sampled, strict=True))


def _nothing_left(screening: Screening) -> str:
    if not screening.excluded:
        return "no updates to aggregate: no silo of the cohort has answered"
    reasons = "; ".join(f"{exclusion.client}: {exclusion.message}" for exclusion in screening.excluded)
    return f"no usable update is left in this round: {reasons}"
