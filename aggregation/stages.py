"""The updates of a round on their way through the pre-aggregations into the rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from roundtable.aggregation.preaggregation import PreAggregation
from roundtable.aggregation.registry import Rule, RuleResult
from roundtable.aggregation.rows.matrix import MixedRows, UpdateMatrix
from roundtable.aggregation.validation import Exclusion
from roundtable.core.errors import AggregationError
from roundtable.core.plugins.calls import foreign_call
from roundtable.core.seeds import derive_seed


@dataclass(frozen=True)
class RuleContext:
    """What some rules know beside the round's updates.

    previous: the last round's aggregate [d] (centred clipping). root_update: the update of the server's own
    trusted data [d] (FLTrust). history: rows of summed past updates, one for each client of this round, in
    the same order (FoolsGold).
    """

    previous: torch.Tensor | None = None
    root_update: torch.Tensor | None = None
    history: UpdateMatrix | None = None

    def select(self, indices: Sequence[int]) -> RuleContext:
        """The context of some of the round's clients."""
        history = None if self.history is None else self.history.select(indices)
        return RuleContext(self.previous, self.root_update, history)


class Stages:
    """The matrix and weights on their way through the pre-aggregations into the rule."""

    def __init__(
        self,
        matrix: UpdateMatrix,
        weights: np.ndarray,
        seed: int,
        context: RuleContext,
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

    def prepare(self, position: int, step: PreAggregation, parameters: dict[str, Any]) -> None:
        """Puts a pre-aggregation in front of what follows; `position` is its place in the list."""
        parameters = self._lower_f(step.name, parameters)
        if step.takes("seed"):
            parameters["seed"] = derive_seed(self._seed, "aggregation", position)
        with foreign_call(f"pre-aggregation {step.name!r}", step.function, AggregationError):
            mixing = step.function(self.matrix, self.weights, **parameters)
        if not isinstance(mixing, np.ndarray) or mixing.ndim != 2 or mixing.shape[1] != self.matrix.rows:
            shape = list(mixing.shape) if isinstance(mixing, np.ndarray) else type(mixing).__name__
            raise AggregationError(
                f"pre-aggregation {step.name!r} returned {shape}, not an array [m, {self.matrix.rows}]"
            )
        self.mix(mixing, step.scales_only)

    def apply(self, rule: Rule, parameters: dict[str, Any]) -> tuple[Mapping[str, Any], RuleResult]:
        """Runs the rule; returns the parameters it ran with, and its result."""
        parameters = self._lower_f(rule.name, parameters)
        self._resolve_pivot(parameters)
        weights = self.weights if rule.weighted else np.ones(self.matrix.rows)
        with foreign_call(f"aggregation rule {rule.name!r}", rule.function, AggregationError):
            result = rule.function(self.matrix, weights, **parameters, **self._provided(rule))
        if isinstance(result, torch.Tensor):
            result = RuleResult(result)
        if not isinstance(result, RuleResult):
            raise AggregationError(
                f"rule {rule.name!r} returned a {type(result).__name__}, not a tensor or a RuleResult"
            )
        if tuple(result.made.shape) != (self.matrix.columns,):
            raise AggregationError(
                f"rule {rule.name!r} returned shape {list(result.made.shape)}, not [{self.matrix.columns}]"
            )
        return parameters, result

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
