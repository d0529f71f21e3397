"""`[metrics]`: figures that a job works out from the sums of what its silos measure."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Annotated

from pydantic import AfterValidator, Field

from roundtable.core.errors import ConfigError
from roundtable.core.measures.columns import why_not_a_metric
from roundtable.core.measures.expressions import Expression, parse_expression
from roundtable.core.toml_tables import Name

parse = cache(parse_expression)
MOST = 64


def _checked(metrics: Mapping[str, str]) -> Mapping[str, str]:
    for name, text in metrics.items():
        if why := why_not_a_metric(name):
            raise ValueError(f"{name}: {why}")
        try:
            found = parse(text)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        if not found.names:
            raise ValueError(f"{name}: {text!r} names no metric")
        if others := sorted(found.names & metrics.keys()):
            raise ValueError(
                f"{name}: {text!r} names {', '.join(others)}, which is worked out here too; write it out in "
                "terms of what silos measure"
            )
    return metrics


MetricsTable = Annotated[dict[Name, str], Field(max_length=MOST), AfterValidator(_checked)]


def expressions_of(metrics: Mapping[str, str]) -> dict[str, Expression]:
    """The table, parsed."""
    return {name: parse(text) for name, text in metrics.items()}


def check_summed(metrics: Mapping[str, str], bounds: Mapping[str, float]) -> None:
    """Raises ConfigError where a figure needs a metric that no secure sum holds (`evaluation.bounds`)."""
    for name, found in expressions_of(metrics).items():
        if lacking := sorted(found.names - bounds.keys()):
            raise ConfigError(
                f"metrics.{name} = {found.text!r} needs {', '.join(lacking)}, and evaluation.bounds sums "
                f"{', '.join(sorted(bounds)[:8])}: add a bound for it, or leave the figure out",
                key=("metrics", name),
            )
