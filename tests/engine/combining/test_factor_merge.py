"""Low-rank factors that are averaged: against cases computed by others, and what is told of the loss."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from roundtable.aggregation import TensorMatrix
from roundtable.core import JobConfig, Layout
from roundtable.core.errors import ConfigError, PrivacyError
from roundtable.engine import Rows, combine, initial_server_state, make_plan
from roundtable.engine.messages import RowReference, Update

SHARED = os.environ.get("ROUNDTABLE_SHARED", Path(__file__).resolve().parents[4] / "shared")
FILE = Path(SHARED) / "reference" / "lora_cases.json"
CASES = json.loads(FILE.read_text())["cases"] if FILE.is_file() else []
State = dict[str, torch.Tensor]
DOWN, UP, MAGNITUDE = (
    "x.lora_A.default.weight",
    "x.lora_B.default.weight",
    "x.lora_magnitude_vector.default.weight",
)
EXACT = {"aggregation": {"validation": {"weight_ratio": "off", "norm_ratio": "off"}}}
"""The cases weigh by tokens as they are, which no ratio caps."""


def cases(*methods: str) -> list[Any]:
    found = [pytest.param(case, id=case["name"]) for case in CASES if case["method"] in methods]
    return found or [pytest.param({}, marks=pytest.mark.skip(reason="no reference cases are here"))]


def clients_of(case: dict[str, Any], names: dict[str, str]) -> list[State]:
    return [{name: torch.tensor(each[key]) for name, key in names.items()} for each in case["clients"]]


def merged(
    states: list[State],
    weights: list[int],
    start: torch.Tensor | None = None,
    **tables: Any,
) -> tuple[State, float | None]:
    """The factors that the coordinator makes of clients' factors, and the error that it tells."""
    layout = Layout.of(states[0])
    begin = torch.zeros(layout.size) if start is None else start
    plan = make_plan(JobConfig.model_validate({"task": "t", **tables}), len(states)).over(layout)
    rows = torch.stack([layout.flatten(state) for state in states]) - begin
    updates = [Update(f"silo-{i}", RowReference(i), n) for i, n in enumerate(weights)]
    state = initial_server_state(plan, layout.size)
    made = combine(plan, Rows(TensorMatrix(rows), updates), begin, state, round=1, seed=0)
    told = made.account.training.get("merge_error")
    return layout.unflatten(made.vector), told[0] if told else None


@pytest.mark.parametrize("case", cases("fedit"))
def test_averaged_factors_and_their_error_are_those_of_the_cases(case: dict[str, Any]) -> None:
    states = clients_of(case, {DOWN: "A", UP: "B"})
    factors, error = merged(states, [each["weight"] for each in case["clients"]], **EXACT)
    expected = case["expected"]
    torch.testing.assert_close(factors[DOWN], torch.tensor(expected["A"]), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(factors[UP], torch.tensor(expected["B"]), rtol=1e-5, atol=1e-6)
    delta = case["clients"][0]["scale"] * factors[UP] @ factors[DOWN]
    torch.testing.assert_close(delta, torch.tensor(expected["delta"]), rtol=1e-5, atol=1e-5)
    assert error == pytest.approx(expected["relative_error"], rel=1e-6)


@pytest.mark.parametrize("case", cases("ffa"))
def test_a_common_frozen_factor_loses_nothing(case: dict[str, Any]) -> None:
    """B alone travels, so that nothing is told; with A along and alike everywhere the error is zero."""
    weights = [each["weight"] for each in case["clients"]]
    factors, error = merged(clients_of(case, {UP: "B"}), weights, **EXACT)
    delta = case["clients"][0]["scale"] * factors[UP] @ torch.tensor(case["clients"][0]["A"])
    torch.testing.assert_close(delta, torch.tensor(case["expected"]["exact_delta"]), rtol=1e-5, atol=1e-5)
    assert error is None
    assert merged(clients_of(case, {DOWN: "A", UP: "B"}), weights, **EXACT)[1] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("case", cases("dora"))
def test_averaged_dora_is_that_of_the_cases_and_no_error_is_claimed(case: dict[str, Any]) -> None:
    names = {DOWN: "A", UP: "B", MAGNITUDE: "magnitude"}
    states = clients_of(case, names)
    factors, error = merged(states, [each["weight"] for each in case["clients"]], **EXACT)
    for name, key in names.items():
        torch.testing.assert_close(factors[name], torch.tensor(case["expected"][key]), rtol=1e-5, atol=1e-6)
    assert error is None


def random_states(seed: int, count: int) -> list[State]:
    chance = torch.Generator().manual_seed(seed)
    shapes = {
        "a.lora_A.default.weight": (3, 500),
        "a.lora_B.default.weight": (7, 3),
        "b.lora_A.default.weight": (2, 6),
        "b.lora_B.default.weight": (5, 2),
        "head.weight": (4, 4),
    }
    return [{n: torch.randn(s, generator=chance) for n, s in shapes.items()} for _ in range(count)]


@pytest.mark.parametrize("block", [1 << 20, 64])
def test_the_error_is_a_share_of_the_rounds_change(
    block: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against matrices written out, from factors that are not zero, over pairs that lie in several blocks."""
    plain = TensorMatrix.blocks
    monkeypatch.setattr(TensorMatrix, "blocks", lambda self, budget=0: plain(self, 4 * block))
    begin, *states = random_states(1, 5)
    weights = [1, 5, 2, 2]
    _, error = merged(states, weights, Layout.of(begin).flatten(begin))
    lost = moved = 0.0
    for layer in "ab":
        down, up = f"{layer}.lora_A.default.weight", f"{layer}.lora_B.default.weight"
        shares = [weight / sum(weights) for weight in weights]
        exact = sum(p * s[up].double() @ s[down].double() for p, s in zip(shares, states, strict=True))
        means = [sum(p * s[n].double() for p, s in zip(shares, states, strict=True)) for n in (up, down)]
        lost += float((exact - means[0] @ means[1]).square().sum())
        moved += float((exact - begin[up].double() @ begin[down].double()).square().sum())
    assert error == pytest.approx((lost / moved) ** 0.5, rel=1e-5)


@pytest.mark.parametrize(
    "tables",
    [
        {"aggregation": {"rule": "median"}},
        {"aggregation": {"validation": {"policy": "clip", "max_norm": 1.0}}},
        {
            "aggregation": {"weighting": "uniform"},
            "privacy": {"level": "client", "clip_norm": 1.0, "noise_multiplier": 1.0, "delta": 1e-3},
            "evaluation": {"every": 0},
        },
    ],
    ids=["another rule", "clipped", "noise"],
)
def test_nothing_is_told_where_noise_hides_updates_or_no_plain_mean_is_made(tables: dict[str, Any]) -> None:
    assert merged(random_states(1, 4), [1] * 4)[1] is not None
    assert merged(random_states(1, 4), [1] * 4, **tables)[1] is None


def test_a_client_without_a_finite_update_is_no_part_of_the_error() -> None:
    states = random_states(2, 4)
    _, without = merged(states[:3], [1] * 3)
    states[3]["head.weight"][0, 0] = float("nan")
    states[3]["a.lora_A.default.weight"].fill_(9.0)
    assert merged(states, [1] * 4)[1] == pytest.approx(without)


@pytest.mark.parametrize("case", cases("flora", "flexlora", "hetlora"))
def test_what_is_merged_of_factors_of_different_ranks_is_that_of_the_cases(case: dict[str, Any]) -> None:
    """In float32 through the whole step, from a ΔW of zero, each client's scale within its B."""
    expected, clients = case["expected"], case["clients"]
    weights = [each["weight"] for each in clients]
    # Of a rank that holds all: FlexLoRA's clients take the first of its rows.
    rank = sum(each["rank"] for each in clients) if case["method"] == "flora" else 5
    if case["method"] == "hetlora":
        rank = max(each["rank"] for each in clients)
    states = []
    for each in clients:
        down, up = torch.tensor(each["A"]), each["scale"] * torch.tensor(each["B"])
        padded = {DOWN: torch.zeros(rank, down.shape[1]), UP: torch.zeros(up.shape[0], rank)}
        padded[DOWN][: len(down)], padded[UP][:, : len(down)] = down, up
        states.append(padded)
    factors, error = merged(states, weights, algorithm={"name": case["method"]}, **EXACT)
    delta = torch.tensor(expected["delta"])
    torch.testing.assert_close(factors[UP] @ factors[DOWN], delta, rtol=1e-5, atol=1e-5)
    assert error == pytest.approx(expected["relative_error"], rel=1e-6, abs=1e-5)
    if case["method"] == "flexlora":
        for each, own in zip(clients, expected["clients"], strict=True):
            first = factors[UP][:, : each["rank"]] @ factors[DOWN][: each["rank"]]
            wanted = each["scale"] * torch.tensor(own["B"]) @ torch.tensor(own["A"])
            torch.testing.assert_close(first, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["flora", "flexlora", "hetlora"])
def test_merged_factors_are_those_of_matrices_written_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From factors that are not zero, in pieces of a few columns; what is no factor is averaged."""
    plain = TensorMatrix.blocks
    monkeypatch.setattr(TensorMatrix, "blocks", lambda self, budget=0: plain(self, 256))
    begin, *states = random_states(1, 5)
    weights = [1, 5, 2, 2]
    flat = Layout.of(begin).flatten(begin)
    made, error = merged(states, weights, flat, algorithm={"name": name}, **EXACT)
    shares = [weight / 10 for weight in weights]
    lost = moved = 0.0
    for layer in "ab":
        down, up = f"{layer}.lora_A.default.weight", f"{layer}.lora_B.default.weight"
        products = [state[up].double() @ state[down].double() for state in states]
        start = begin[up].double() @ begin[down].double()
        exact = sum(share * product for share, product in zip(shares, products, strict=True))
        exact = exact + start if name == "flora" else exact
        if name == "hetlora":
            norms = torch.stack([product.norm() for product in products])
            means = [
                sum(w * s[n].double() for w, s in zip(norms / norms.sum(), states, strict=True))
                for n in (up, down)
            ]
            wanted = means[0] @ means[1]
        else:
            u, values, vt = torch.linalg.svd(exact)
            rank = len(begin[down])
            wanted = u[:, :rank] * values[:rank] @ vt[:rank]
        torch.testing.assert_close((made[up] @ made[down]).double(), wanted, rtol=1e-4, atol=1e-4)
        lost += float((exact - wanted).square().sum())
        moved += float((exact - start).square().sum())
    assert error == pytest.approx((lost / moved) ** 0.5, rel=1e-4)
    head = sum(share * state["head.weight"] for share, state in zip(shares, states, strict=True))
    torch.testing.assert_close(made["head.weight"], head)


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"privacy": {"level": "none", "secure_aggregation": True, "clip_norm": 1.0}}, "secure_aggregation"),
        ({"privacy": {"level": "client", "clip_norm": 1.0, "noise_multiplier": 1.0, "delta": 1e-3}}, "level"),
        ({"aggregation": {"rule": "median"}}, "median"),
        ({"aggregation": {"validation": {"policy": "clip"}}}, "clip"),
        (
            {"aggregation": {"server_optimizer": {"name": "fedadam", "learning_rate": 0.1}}},
            "server_optimizer",
        ),
        ({"round": {"mode": "buffered", "buffer": 2}}, "buffered"),
        ({"transfer": {"up": "bfloat16"}}, "transfer.up"),
        ({"regions": {"sum": True}}, "regions.sum"),
        ({"transfer": {"down": "int8(block=64)"}}, "transfer.down"),
        ({"aggregation": {"validation": {"max_norm": 1.0}}}, "max_norm = 1 and .* from ranks"),
        ({"algorithm": {"name": "flora", "ranks": {"silo-0": 9}}}, "silo-0 = 9"),
        ({"algorithm": {"name": "hetlora", "ranks_by_memory": [2, 9]}}, "ranks_by_memory: 9, and"),
        (
            {"algorithm": {"name": "hetlora"}, "aggregation": {"weighting": "uniform"}},
            "by the norms of their products whatever else is said; set weighting = 'examples'",
        ),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_hides_or_rounds_single_factors_is_refused(tables: dict[str, Any], said: str) -> None:
    tables = {"evaluation": {"every": 0}, "algorithm": {"name": "flora"}, **tables}
    with pytest.raises((ConfigError, PrivacyError), match=said):
        merged(random_states(1, 4), [1] * 4, **tables)


def test_a_row_that_no_client_of_a_round_has_can_still_learn_in_a_later_one() -> None:
    """HetLoRA, a round of clients of rank 1: B is zero behind it, A as before, the product the same."""
    begin, *states = random_states(1, 4)
    for state in states:
        for name, value in state.items():
            if "lora_A" in name:
                value[1:] = 0
            elif "lora_B" in name:
                value[:, 1:] = 0
    made, _ = merged(states, [1] * 3, Layout.of(begin).flatten(begin), algorithm={"name": "hetlora"}, **EXACT)
    for layer in "ab":
        down, up = f"{layer}.lora_A.default.weight", f"{layer}.lora_B.default.weight"
        assert not made[up][:, 1:].any()
        assert torch.equal(made[down][1:], begin[down][1:])


def test_a_model_without_pairs_is_refused() -> None:
    with pytest.raises(ConfigError, match="lora_A, lora_B"):
        merged([{"head.weight": torch.ones(2, 2)}] * 2, [1] * 2, algorithm={"name": "hetlora"})
