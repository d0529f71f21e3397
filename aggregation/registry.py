"""Aggregation rules by the name that a job file uses: built in, installed, or in a file beside the job.

A rule is a plain function `(matrix, weights, **parameters) → vector`, or `→ RuleResult` where it can say how
much each row counted. A rule of somebody else is an object of an installed package, behind an entry point in
the group `roundtable.aggregation_rules` whose name is the rule's, or `file.py:Object`: in either case such a
function, a class without arguments whose objects are called like one, or a `Rule`, which declares more.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from roundtable.aggregation.rows.row_passes import ColumnPass
from roundtable.core.errors import AggregationError
from roundtable.core.paths import AnyPath
from roundtable.core.plugins.calls import as_function, check_call, check_parameters, named_at
from roundtable.core.plugins.doors import names, resolve

ENTRY_POINT_GROUP = "roundtable.aggregation_rules"

ARGUMENTS = ("matrix", "weights")
TABLE = ("aggregation", "parameters")

PROVIDED = ("seed", "previous", "root_update", "history")
"""Parameters that the pipeline fills in itself, for a rule that has them in its signature."""


@dataclass(frozen=True)
class RuleResult:
    """A rule's answer.

    made: the vector [d], or the pass over the rows that gives it: the round then never has all of it in
    memory. influence: how much each row counts in it, [n], summing to 1 for a mean of rows; None where that
    differs from parameter to parameter. details: what the rule found, for the diagnosis.
    """

    made: torch.Tensor | ColumnPass
    influence: np.ndarray | None = None
    details: Mapping[str, object] = field(default_factory=dict)

    @cached_property
    def vector(self) -> torch.Tensor:
        """The whole vector [d]."""
        return self.made.whole() if isinstance(self.made, ColumnPass) else self.made

    def part(self, start: int, stop: int) -> torch.Tensor:
        """Some columns of the vector, [stop − start]."""
        whole = not isinstance(self.made, ColumnPass) or "vector" in vars(self)
        return self.vector[start:stop] if whole else self.made.part(start, stop)  # type: ignore[union-attr]


RuleFunction = Callable[..., RuleResult | torch.Tensor]

Kept = Callable[[torch.Tensor, Mapping[str, Any], Mapping[str, Any]], torch.Tensor]
"""For a coordinate-wise rule: from a block [n, width], the parameters and the result's details to a mask
[n, width] of the values that the result is the mean of."""


@dataclass(frozen=True)
class Rule:
    """A rule as the pipeline knows it.

    needs_gram: its first step is the Gram matrix. weighted: it uses the weights of rows; a robust rule does
    not, because a client can claim any number of examples. kept: what a coordinate-wise rule averages.
    reads_all: one value that is not finite, anywhere, is refused by the rule or shows in its result.
    """

    name: str
    function: RuleFunction
    paper: str = ""
    needs_gram: bool = False
    weighted: bool = False
    kept: Kept | None = None
    reads_all: bool = False

    def check(self, parameters: Mapping[str, object]) -> None:
        """Raises ConfigError for parameters that the rule does not have, or lacks."""
        owner = f"aggregation rule {self.name!r}"
        check_parameters(
            owner, self.function, parameters, skip=len(ARGUMENTS), table=TABLE, provided=PROVIDED
        )
        f = parameters.get("f", 0)
        if isinstance(f, int) and f < 0:
            raise AggregationError(f"{owner}: f counts byzantine silos and cannot be {f}")

    @cached_property
    def _parameters(self) -> frozenset[str]:
        return frozenset(inspect.signature(self.function).parameters)

    def takes(self, parameter: str) -> bool:
        """Whether the rule's function has this parameter."""
        return parameter in self._parameters


RULES: dict[str, Rule] = {}


def rule(
    name: str,
    *,
    paper: str,
    needs_gram: bool = False,
    weighted: bool = False,
    kept: Kept | None = None,
    reads_all: bool = False,
) -> Callable[[Callable[..., RuleResult]], Callable[..., RuleResult]]:
    """Registers one of the rules of this package."""

    def register(function: Callable[..., RuleResult]) -> Callable[..., RuleResult]:
        RULES[name] = Rule(name, function, paper, needs_gram, weighted, kept, reads_all)
        return function

    return register


def find_rule(name: str, folder: AnyPath | None = None) -> Rule:
    """The rule that a job's `name` means; `file.py:Object` is looked for in `folder`, refused without one.

    Raises ConfigError where there is none, or what is there is no rule.
    """
    with named_at("aggregation", "rule"):
        definition = resolve("aggregation rule", name, RULES, ENTRY_POINT_GROUP, folder)
        if isinstance(definition, Rule):
            check_call(f"aggregation rule {name!r}", definition.function, ARGUMENTS)
            return definition
        return Rule(name, as_function("aggregation rule", name, definition, ARGUMENTS), weighted=True)


def rule_names() -> list[str]:
    """Names of all rules that a job file can use, installed ones included."""
    return names(RULES, ENTRY_POINT_GROUP)
