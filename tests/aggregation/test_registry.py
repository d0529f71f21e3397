"""Rules of others: a plain function behind an entry point."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path
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
    preaggregation,
    rule_names,
    rules,
)
from roundtable.core.errors import AggregationError, ConfigError
from roundtable.core.plugins import doors


def first_silo(matrix: UpdateMatrix, weights: np.ndarray, *, scale: float = 1.0) -> torch.Tensor:
    """A rule as somebody else would write it."""
    return combine(matrix, np.eye(matrix.rows)[0] * scale * weights[0])


def wrong_shape(matrix: UpdateMatrix, weights: np.ndarray) -> torch.Tensor:
    return torch.zeros(1)


def halved(matrix: UpdateMatrix, weights: np.ndarray, *, by: float = 2.0) -> np.ndarray:
    """A step in front of a rule, as somebody else would write it."""
    return np.eye(matrix.rows) / by


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint("first_silo", f"{__name__}:first_silo", ENTRY_POINT_GROUP),
        EntryPoint("wrong_shape", f"{__name__}:wrong_shape", ENTRY_POINT_GROUP),
        EntryPoint("halved", f"{__name__}:halved", preaggregation.ENTRY_POINT_GROUP),
    ]
    functions = {"first_silo": first_silo, "wrong_shape": wrong_shape, "halved": halved}
    monkeypatch.setattr(EntryPoint, "load", lambda self: functions[self.name])

    def entry_points(group: str, name: str = "") -> list[EntryPoint]:
        return [point for point in points if point.group == group and name in ("", point.name)]

    monkeypatch.setattr(doors, "entry_points", entry_points)


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


@pytest.mark.usefixtures("installed")
def test_a_step_behind_an_entry_point_runs_in_front_of_a_rule() -> None:
    values = torch.ones(3, 10)
    config = AggregationConfig("mean", pre=(("halved", {"by": 4.0}),))
    found = aggregate(TensorMatrix(values), [ClientRow(name) for name in "abc"], config)
    torch.testing.assert_close(found.vector, values[0] / 4)
    with pytest.raises(ConfigError, match="'halved' has no parameter 'f'; it takes: by"):
        AggregationConfig("mean", pre=(("halved", {"f": 1}),))


FILE = """
import numpy as np
from roundtable.aggregation import combine
from roundtable.aggregation.registry import Rule

def last_silo(matrix, weights, *, scale: float = 1.0):
    return combine(matrix, np.eye(matrix.rows)[-1] * scale)

class Last:
    def __call__(self, matrix, weights, *, scale: float = 1.0):
        return last_silo(matrix, weights, scale=scale)

class Needy:
    def __init__(self, more): ...

declared = Rule("declared", last_silo, paper="none", needs_gram=True)
answer = 42

def doubled(matrix, weights):
    return np.eye(matrix.rows) * 2

def bare(matrix):
    return matrix

class Bare:
    def __call__(self, matrix, *, scale=1.0): ...

def failing(matrix, weights):
    return {}["lost"]

def no_vector(matrix, weights):
    return [1.0]
"""


@pytest.mark.parametrize("name", ["last_silo", "Last", "declared"])
def test_a_rule_and_a_step_in_a_file_beside_the_job(tmp_path: Path, name: str) -> None:
    (tmp_path / "mine.py").write_text(FILE)
    config = AggregationConfig(
        f"mine.py:{name}", {"scale": 3.0}, pre=(("mine.py:doubled", {}),), folder=tmp_path
    )
    values = torch.randn(3, 10, generator=torch.Generator().manual_seed(1))
    found = aggregate(TensorMatrix(values), [ClientRow(each) for each in "abc"], config)
    torch.testing.assert_close(found.vector, values[2] * 6)
    assert config.needs_gram == (name == "declared")
    with pytest.raises(ConfigError, match=r"has no parameter 'size'; it takes: scale"):
        AggregationConfig(f"mine.py:{name}", {"size": 1}, folder=tmp_path)
    with pytest.raises(ConfigError, match=r"scale must be of type float, not 'x'"):
        AggregationConfig(f"mine.py:{name}", {"scale": "x"}, folder=tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mine.py:lost_silo", "did you mean 'last_silo'"),
        ("mine.py:answer", "is a int, and nothing that can be called"),
        ("mine.py:Needy", r"mine\.py, line 13\) needs the parameter 'more'"),
        ("mine.py:bare", r"mine\.py, line 22\) takes \(matrix\); it is called with \(matrix, weights\)"),
        ("mine.py:Bare", r"takes \(matrix, \*, scale=1\.0\); it is called with \(matrix, weights\)"),
        ("other.py:last_silo", "there is no file"),
        ("trimed_mean", "did you mean 'trimmed_mean'"),
    ],
)
def test_a_rule_that_is_not_there_is_named_with_the_nearest(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "mine.py").write_text(FILE)
    with pytest.raises(ConfigError, match=message):
        AggregationConfig(name, folder=tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("failing", r"'mine.py:failing' failed: KeyError: 'lost' \(mine.py, line 29, in failing\)"),
        ("no_vector", r"returned a list, not a tensor or a RuleResult"),
    ],
)
def test_what_a_rule_of_others_does_wrong_in_a_round_is_an_error_of_ours(
    tmp_path: Path, name: str, message: str
) -> None:
    (tmp_path / "mine.py").write_text(FILE)
    config = AggregationConfig(f"mine.py:{name}", folder=tmp_path)
    with pytest.raises(AggregationError, match=message):
        aggregate(TensorMatrix(torch.ones(2, 3)), [ClientRow("a"), ClientRow("b")], config)


def test_a_file_is_refused_where_the_job_was_sent_from_elsewhere() -> None:
    with pytest.raises(ConfigError, match="a job that was sent brings no code"):
        AggregationConfig("mine.py:last_silo")
    with pytest.raises(ConfigError, match="a job that was sent brings no code"):
        AggregationConfig("mean", pre=(("mine.py:doubled", {}),))


def test_a_new_module_of_rules_is_registered_by_being_there() -> None:
    modules = {path.stem for path in Path(str(rules.__file__)).parent.glob("*.py")} - {"__init__"}
    assert {f"roundtable.aggregation.rules.{name}" for name in modules} <= set(sys.modules)


def test_every_rule_names_its_paper_and_explains_itself() -> None:
    for rule in RULES.values():
        assert any(character.isdigit() for character in rule.paper), rule.name
        documentation: Any = rule.function.__doc__
        assert len(documentation) > 60, rule.name
