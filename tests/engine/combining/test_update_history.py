"""What clients sent before, for rules that compare pasts: kept exactly, and spoiled by nobody for others."""

from __future__ import annotations

from pathlib import Path

import torch

from roundtable.aggregation import TensorMatrix
from roundtable.core import open_model, parse_job
from roundtable.engine import Combined, Rows, ServerState, combine, initial_server_state, make_plan
from roundtable.engine.messages import RowReference, Update

PLAN = make_plan(parse_job('task = "t"\n[aggregation]\nrule = "foolsgold"'), population=4)
FIRST = {"a": [1.0, 0.0, 2.0], "b": [0.0, 3.0, 0.1], "c": [1.0, 1.0, -1.0]}
SECOND = {"b": [0.5, 1.0, 0.0], "c": [0.0, -2.0, 1.0], "d": [4.0, 0.0, 1.0]}


def run(state: ServerState, sent: dict[str, list[float]], number: int) -> Combined:
    updates = [Update(name, RowReference(row), 1) for row, name in enumerate(sent)]
    matrix = TensorMatrix(torch.tensor(list(sent.values())))
    return combine(PLAN, Rows(matrix, updates), torch.zeros(3), state, round=number, seed=1)


def test_updates_are_added_up_by_client() -> None:
    state = run(run(initial_server_state(PLAN, 3), FIRST, 1).state, SECOND, 2).state
    expected = {"a": [1.0, 0.0, 2.0], "b": [0.5, 4.0, 0.1], "c": [1.0, -1.0, 0.0], "d": [4.0, 0.0, 1.0]}
    assert {name: total.tolist() for name, total in state.past.items()} == {
        name: torch.tensor(total).tolist() for name, total in expected.items()
    }


def test_the_past_survives_a_restart_to_the_bit(tmp_path: Path) -> None:
    state = run(initial_server_state(PLAN, 3), FIRST, 1).state
    (tmp_path / "state.safetensors").write_bytes(b"".join(state.blocks()))
    restored = ServerState.from_model(open_model(tmp_path / "state.safetensors"))
    assert torch.equal(run(restored, SECOND, 2).vector, run(state, SECOND, 2).vector)


def test_an_update_that_is_left_out_leaves_the_past_alone() -> None:
    state = run(initial_server_state(PLAN, 3), FIRST, 1).state
    result = run(state, {**SECOND, "c": [float("nan"), 0.0, 0.0]}, 2)
    assert list(result.account.excluded) == ["c"]
    assert result.state.past["c"].tolist() == FIRST["c"]


def test_a_past_beyond_float32_spoils_only_itself() -> None:
    huge = {**FIRST, "c": [3e38, 0.0, 0.0]}
    state = run(initial_server_state(PLAN, 3), huge, 1).state
    result = run(state, huge, 2)
    assert not result.account.excluded
    assert result.state.past["c"].tolist() == torch.tensor(huge["c"]).tolist()
    assert result.state.past["a"].tolist() == [2.0, 0.0, 4.0]


def test_an_attempt_that_is_repeated_starts_from_the_same_past() -> None:
    state = run(initial_server_state(PLAN, 3), FIRST, 1).state
    once, again = run(state, SECOND, 2), run(state, SECOND, 2)
    assert torch.equal(once.vector, again.vector)
    assert {name: t.tolist() for name, t in once.state.past.items()} == {
        name: t.tolist() for name, t in again.state.past.items()
    }
