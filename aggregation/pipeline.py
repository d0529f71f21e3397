"""From a round's updates to one vector: validate, pre-aggregate, apply the rule, check, explain."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import torch

from roundtable.aggregation.diagnosis import Diagnosis, contributions, pairwise
from roundtable.aggregation.gram import gram
from roundtable.aggregation.influence import influence_of_rows
from roundtable.aggregation.matrix import MixedRows, UpdateMatrix
from roundtable.aggregation.preaggregation import find_pre_aggregation
from roundtable.aggregation.registry import Rule, RuleResult, find_rule
from roundtable.aggregation.validation import (
    ClientRow,
    Exclusion,
    Screening,
    ValidationPolicy,
    screen,
)
from roundtable.core.errors import AggregationError, ConfigError
from roundtable.core.seeds import derive_seed

Weighting = Literal["examples", "uniform", "inverse_loss", "custom"]


@dataclass(frozen=True)
class AggregationConfig:
    """The `[aggregation]` table of a job file.

    rule, parameters: a rule by name. pre: steps in front of it, in order; a step that needs `f` and is given
    none takes the rule's. weighting: what a mean weighs by; robust rules count every silo once whatever it
    claims. weights: by silo name, for `custom`. validation: what becomes of an update that is broken or
    longer than max_norm. Raises ConfigError for names or parameters that do not exist.
    """

    rule: str = "mean"
    parameters: Mapping[str, Any] = field(default_factory=dict)
    pre: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    weighting: Weighting = "examples"
    weights: Mapping[str, float] = field(default_factory=dict)
    validation: ValidationPolicy = "exclude"
    max_norm: float | None = None

    def __post_init__(self) -> None:
        find_rule(self.rule).check(self.parameters)
        for name, parameters in self.pre:
            find_pre_aggregation(name).check(parameters)
            if find_pre_aggregation(name).takes_f and "f" not in {**self.parameters, **parameters}:
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

    @property
    def needs_gram(self) -> bool:
        """Whether a round measures the Gram matrix of its updates."""
        return find_rule(self.rule).needs_gram or any(
            find_pre_aggregation(name).needs_gram for name, _ in self.pre
        )


@dataclass(frozen=True)
class Context:
    """What some rules know beside the round's updates.

    previous: the last round's aggregate [d] (centred clipping). root_update: the update of the server's own
    trusted data [d] (FLTrust). history: rows of summed past updates, one for each client of this round, in
    the same order (FoolsGold).
    """

    previous: torch.Tensor | None = None
    root_update: torch.Tensor | None = None
    history: UpdateMatrix | None = None


@dataclass(frozen=True)
class Aggregate:
    """The outcome of a round.

    vector: [d]. weights: share of each client's update in it, where the rule is a mean of rows or the
    diagnosis was asked for, else empty. excluded: whose update was left out, why.
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
    context: Context | None = None,
    diagnose: bool = False,
) -> Aggregate:
    """Aggregates a round's updates; row i of `matrix` is the update of `clients[i]`.

    Rows are taken in the order of the clients' names, so the order of arrival changes nothing. Updates that
    are not finite never reach a rule: they are left out and lower the rule's f, and more of them than f is an
    error. `seed` is the round's. The vector is float32 (float64 for a float64 matrix), in `out` where given.
    Raises AggregationError where no sound answer exists, InvalidUpdate where the validation policy says fail.
    """
    if len(clients) != matrix.rows:
        raise AggregationError(
            f"{matrix.rows} rows of updates and {len(clients)} clients: they must be one to one"
        )
    order = sorted(range(len(clients)), key=lambda index: clients[index].name)
    context = context or Context()
    if order != list(range(len(clients))):
        matrix, clients = matrix.select(order), [clients[index] for index in order]
        context = _select_history(context, order)
    screening = screen(matrix, clients, config.validation, config.max_norm, config.needs_gram or diagnose)
    names = tuple(clients[index].name for index in screening.kept)
    if not names:
        raise AggregationError(_nothing_left(screening))
    if len(names) < matrix.rows:
        matrix, clients = matrix.select(screening.kept), [clients[index] for index in screening.kept]
        context = _select_history(context, screening.kept)
    stages = _Stages(matrix, _weights(clients, config), seed, context, names, screening.faults)
    if screening.clipped:
        stages.mix(np.diag(screening.factors), keep_weights=True)
    rule, parameters, result = stages.run(config)
    _require_finite(result.vector, config.rule)
    vector = result.vector if out is None else out.copy_(result.vector)
    influence = influence_of_rows(rule, parameters, result, stages.matrix) if diagnose else result.influence
    if influence is not None:
        influence = np.asarray(influence) @ stages.mixing
    diagnosis = _diagnose(matrix, config, names, screening, influence, result, diagnose)
    weights = {} if influence is None else dict(zip(names, influence.tolist(), strict=True))
    return Aggregate(vector, weights, screening.excluded, diagnosis)


class _Stages:
    """The matrix and weights on their way through the pre-aggregations into the rule."""

    def __init__(
        self,
        matrix: UpdateMatrix,
        weights: np.ndarray,
        seed: int,
        context: Context,
        names: tuple[str, ...],
        faults: tuple[Exclusion, ...],
    ) -> None:
        self.matrix = matrix
        self.weights = weights
        self.mixing = np.eye(matrix.rows)
        self._seed = seed
        self._context = context
        self._names = names
        self._faults = faults

    def mix(self, mixing: np.ndarray, keep_weights: bool) -> None:
        """Puts a linear step in front of what follows."""
        self.matrix = MixedRows(self.matrix, mixing)
        self.mixing = mixing @ self.mixing
        if not keep_weights:
            self.weights = np.ones(len(mixing))

    def run(self, config: AggregationConfig) -> tuple[Rule, Mapping[str, Any], RuleResult]:
        """All steps and the rule; returns the rule, the parameters it ran with, and its result."""
        for position, (name, given) in enumerate(config.pre):
            step = find_pre_aggregation(name)
            inherited = {"f": config.parameters["f"]} if step.takes_f and "f" in config.parameters else {}
            parameters = self._lower_f(name, {**inherited, **given})
            if name == "bucketing":
                parameters["seed"] = derive_seed(self._seed, "aggregation", position)
            self.mix(step.function(self.matrix, self.weights, **parameters), step.scales_only)
        rule = find_rule(config.rule)
        parameters = self._lower_f(config.rule, dict(config.parameters))
        self._resolve_pivot(parameters)
        weights = self.weights if rule.weighted else np.ones(self.matrix.rows)
        result = rule.function(self.matrix, weights, **parameters, **self._provided(rule))
        if isinstance(result, torch.Tensor):
            result = RuleResult(result)
        if result.vector.shape != (self.matrix.columns,):
            raise AggregationError(
                f"rule {rule.name!r} returned shape {list(result.vector.shape)}, not [{self.matrix.columns}]"
            )
        return rule, parameters, result

    def _lower_f(self, name: str, parameters: dict[str, Any]) -> dict[str, Any]:
        if "f" not in parameters:
            return parameters
        faults, f = len(self._faults), parameters["f"]
        if faults > f:
            who = ", ".join(f"{fault.client} ({fault.reason})" for fault in self._faults)
            raise AggregationError(
                f"{faults} updates were broken, more than the f = {f} that {name} is to withstand: {who}"
            )
        return {**parameters, "f": f - faults}

    def _resolve_pivot(self, parameters: dict[str, Any]) -> None:
        """A rule that trusts one silo names it; rows are what the rule knows."""
        pivot = parameters.get("pivot")
        if not isinstance(pivot, str):
            return
        if pivot not in self._names:
            raise AggregationError(f"the trusted silo {pivot!r} sent no usable update in this round")
        parameters["pivot"] = self._names.index(pivot)

    def _provided(self, rule: Rule) -> dict[str, Any]:
        offered = {
            "seed": derive_seed(self._seed, "aggregation", "rule"),
            "previous": self._context.previous,
            "root_update": self._context.root_update,
            "history": self._context.history,
        }
        return {name: value for name, value in offered.items() if rule.takes(name)}


def _weights(clients: Sequence[ClientRow], config: AggregationConfig) -> np.ndarray:
    if config.weighting == "examples":
        return np.array([client.examples for client in clients], dtype=np.float64)
    if config.weighting == "uniform":
        return np.ones(len(clients))
    if config.weighting == "custom":
        missing = [client.name for client in clients if client.name not in config.weights]
        if missing:
            raise AggregationError(f"no custom weight for {', '.join(missing)}: add them under weights")
        return np.array([config.weights[client.name] for client in clients], dtype=np.float64)
    for client in clients:
        if client.loss is None or not 0 < client.loss < math.inf:
            raise AggregationError(
                f"inverse-loss weighting needs a positive finite loss of every silo; {client.name} sent "
                f"{client.loss!r}"
            )
    return np.array([1 / client.loss for client in clients if client.loss is not None])


def _select_history(context: Context, indices: Sequence[int]) -> Context:
    if context.history is None:
        return context
    return Context(context.previous, context.root_update, context.history.select(indices))


def _nothing_left(screening: Screening) -> str:
    if not screening.excluded:
        return "no updates to aggregate: no silo of the cohort has answered"
    reasons = "; ".join(f"{exclusion.client}: {exclusion.message}" for exclusion in screening.excluded)
    return f"no usable update is left in this round: {reasons}"


def _require_finite(vector: torch.Tensor, rule: str) -> None:
    if vector.numel() and not bool(torch.isfinite(vector.abs().amax())):
        raise AggregationError(
            f"the result of rule {rule!r} is not finite although every update is: values are too large to "
            "add; set max_norm, or put clip in front of the rule"
        )


def _diagnose(
    matrix: UpdateMatrix,
    config: AggregationConfig,
    names: tuple[str, ...],
    screening: Screening,
    influence: np.ndarray | None,
    result: RuleResult,
    asked: bool,
) -> Diagnosis:
    steps = " + ".join([*(name for name, _ in config.pre), config.rule])
    norms = cosine = distance = shares = None
    if asked or config.needs_gram:
        products = gram(matrix)
        norms, cosine, distance = pairwise(products)
        shares = None if influence is None else contributions(products, influence)
    return Diagnosis(
        rule=steps,
        clients=names,
        excluded=screening.excluded,
        clipped=screening.clipped,
        norms=norms,
        influence=influence,
        contribution=shares,
        cosine=cosine,
        distance=distance,
        details=result.details,
    )
