"""The server optimizer's step by blocks: the bits of the step as a whole, whatever the blocks."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundtable.aggregation import OptimizerState, TensorMatrix, make_optimizer
from roundtable.aggregation.rows import matrix
from roundtable.core import parse_job
from roundtable.core.errors import AggregationError, LayoutError
from roundtable.engine import Combined, Rows, combine, initial_server_state, make_plan
from roundtable.engine.combining.block_step import BlockStep
from roundtable.engine.combining.vector_places import InMemory
from roundtable.engine.messages import RowReference, Update

NAMES = ["fedavg", "fedavgm", "diloco", "fedadagrad", "fedadam", "fedyogi", "fedlion"]


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    columns=st.integers(0, 500),
    cuts=st.lists(st.integers(1, 499), max_size=4),
    again=st.booleans(),
)
def test_an_optimizer_by_blocks_is_the_same_to_the_bit(
    name: str, columns: int, cuts: list[int], again: bool
) -> None:
    optimizer, places = make_optimizer(name), InMemory()
    chance = torch.Generator().manual_seed(columns)
    model = expected = torch.randn(columns, generator=chance)
    state: OptimizerState = optimizer.init(columns)
    whole: OptimizerState = optimizer.init(columns)
    # Vectorised loops and their remainders round alike only where blocks end on whole cache lines.
    ends = sorted({cut // 64 * 64 for cut in cuts if 64 <= cut < columns} | {0, columns})
    for step in range(2):
        delta = torch.randn(columns, generator=chance)
        whole, expected = optimizer.apply(whole, expected, delta, step)
        stepping = BlockStep(optimizer, model, state, step, places.model(columns), places)
        if again:
            stepping.begin()
            stepping.take(0, torch.full((min(7, columns),), 1e38))
        stepping.begin()
        for start, stop in pairwise(ends):
            stepping.take(start, delta[start:stop])
        state, model = stepping.end()
        assert torch.equal(model, expected)
        assert state.scalars == whole.scalars
        assert set(state.vectors) == set(whole.vectors)
        assert all(torch.equal(state.vectors[key], whole.vectors[key]) for key in whole.vectors)


def test_a_state_of_another_model_is_refused() -> None:
    places, optimizer = InMemory(), make_optimizer("fedavgm")
    with pytest.raises(LayoutError, match="momentum has 3 values and the model 4"):
        BlockStep(optimizer, torch.zeros(4), optimizer.init(3), 0, places.model(4), places)
    stepping = BlockStep(optimizer, torch.zeros(4), optimizer.init(4), 0, places.model(4), places)
    with pytest.raises(LayoutError, match="delta has 5 values and the model 4"):
        stepping.take_all(torch.zeros(5))


def combined(text: str, rows: torch.Tensor, model: torch.Tensor) -> Combined:
    plan = make_plan(parse_job(f'task = "t"\n{text}'), population=len(rows))
    updates = [Update(f"silo-{i}", RowReference(i), 1 + i) for i in range(len(rows))]
    state = initial_server_state(plan, len(model))
    return combine(plan, Rows(TensorMatrix(rows), updates), model, state, round=1, seed=3)


@pytest.mark.parametrize(
    "text",
    [
        "",
        '[aggregation]\nrule = "median"\nserver_optimizer = {name = "fedadam"}',
        '[aggregation]\nrule = "multi_krum"\nparameters = {f = 1}\ndiagnosis = true',
        '[aggregation]\nrule = "trimmed_mean"\nparameters = {f = 1}\npre = [{name = "clip", norm = 3.0}]',
    ],
)
def test_the_model_does_not_depend_on_the_blocks(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = torch.Generator().manual_seed(2)
    rows, model = torch.randn(6, 50_000, generator=chance), torch.randn(50_000, generator=chance)
    one = combined(text, rows, model)
    small = lambda rows, itemsize, budget: matrix.CELL  # noqa: E731
    monkeypatch.setattr(matrix, "block_width", small)
    other = combined(text, rows, model)
    assert torch.equal(one.vector, other.vector)
    assert one.account == other.account
    assert one.state.optimizer.scalars == other.state.optimizer.scalars
    for name, vector in one.state.optimizer.vectors.items():
        assert torch.equal(vector, other.state.optimizer.vectors[name])


def test_an_update_that_is_not_finite_is_left_out_whichever_block_it_is_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(matrix, "block_width", lambda rows, itemsize, budget: matrix.CELL)
    rows = torch.ones(3, 5 * matrix.CELL)
    rows[1] = 3.0
    expected = combined("", rows[:2], torch.zeros(rows.shape[1]))
    rows[2, 4 * matrix.CELL + 7] = torch.nan
    found = combined("", rows, torch.zeros(rows.shape[1]))
    assert torch.equal(found.vector, expected.vector)
    assert list(found.account.excluded) == ["silo-2"]


def test_a_step_too_far_is_told_from_updates_too_large() -> None:
    far = '[aggregation]\nserver_optimizer = {name = "fedavg", learning_rate = 1e30}'
    with pytest.raises(AggregationError, match="lower the server's learning rate"):
        combined(far, torch.full((2, 3), 1e20), torch.zeros(3))
