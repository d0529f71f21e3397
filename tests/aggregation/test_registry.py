"""Rules of others: a plain function behind an entry point."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import numpy as np
import pytest
import torch

from roundtable.aggregation import (
    ENTRY_POINT_GROUP,
    RULES,
    AggregationConfig,
    ClientRow,
    TensorMatrix,
    UpdateMatrix,
    aggregate,
    combine,
    registry,
    rule_names,
)
from roundtable.core.errors import AggregationError, ConfigError


def first_silo(matrix: UpdateMatrix, weights: np.ndarray, *, scale: float = 1.0) -> torch.Tensor:
    """A rule as somebody else would write it."""
    return combine(matrix, np.eye(matrix.rows)[0] * scale * weights[0])


def wrong_shape(matrix: UpdateMatrix, weights: np.ndarray) -> torch.Tensor:
    return torch.zeros(1)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint(name, f"{__name__}:{name}", ENTRY_POINT_GROUP) for name in ("first_silo", "wrong_shape")
    ]
    functions = {"first_silo": first_silo, "wrong_shape": wrong_shape}
    monkeypatch.setattr(EntryPoint, "load", lambda self: functions[self.name])
    monkeypatch.setattr(registry, "entry_points", lambda group: points if group == ENTRY_POINT_GROUP else [])


@pytest.mark.usefixtures("installed")
def test_a_rule_behind_an_entry_point_is_found_checked_and_run() -> None:
    values = torch.randn(3, 10, generator=torch.Generator().manual_seed(1))
    clients = [ClientRow(name, examples=2) for name in "abc"]
    found = aggregate(TensorMatrix(values), clients, AggregationConfig("first_silo", {"scale": 3.0}))
    torch.testing.assert_close(found.vector, values[0] * 6)
    assert found.weights == {}
    assert "first_silo" in rule_names()
    with pytest.raises(ConfigError, match="'first_silo' has no parameter 'size'; it takes: scale"):
        AggregationConfig("first_silo", {"size": 3})
    values[1, 1] = float("nan")
    assert len(aggregate(TensorMatrix(values), clients, AggregationConfig("first_silo")).excluded) == 1
    with pytest.raises(AggregationError, match=r"returned shape \[1\], not \[10\]"):
        aggregate(TensorMatrix(values), clients, AggregationConfig("wrong_shape"))


def test_every_rule_names_its_paper_and_explains_itself() -> None:
    for rule in RULES.values():
        assert any(character.isdigit() for character in rule.paper), rule.name
        documentation: Any = rule.function.__doc__
        assert len(documentation) > 60, rule.name
