"""Boosted trees over silos are those of xgboost on the pooled rows, cut into the same bins."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grown_silos import Frame, described, edges_of, grow, same_trees, trees_of
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from sklearn.datasets import load_diabetes

from roundtable.core.analyses import digit_kernels
from roundtable.core.analyses.boosted_trees import boosting, row_kernels, split_choice
from roundtable.core.analyses.boosted_trees.bin_cuts import (
    SKETCH_ROUNDS,
    cells_for,
    count_cells,
    even_edges,
    quantile_cuts,
    refined,
)
from roundtable.core.analyses.boosted_trees.boosting import GROWING
from roundtable.core.analyses.boosted_trees.row_kernels import AskedNodes, BinnedRows, NodeHistograms
from roundtable.core.analyses.boosted_trees.split_choice import Growth, NodeSplits
from roundtable.core.analyses.boosted_trees.tree_growing import split_code
from roundtable.core.analyses.exact_sums import Digits
from roundtable.core.analyses.questions_table import AnyQuestion
from roundtable.core.errors import ConfigError, ProtocolError
from roundtable.core.tables.table_description import ColumnTable, DataTableTable
from roundtable.core.tables.table_reading import DataTable, read_columns

HEART = "age sex cp trestbps chol fbs restecg thalach exang oldpeak slope ca thal".split()  # noqa: SIM905
DIABETES = "age sex bmi bp s1 s2 s3 s4 s5 s6".split()  # noqa: SIM905
PARTS = (slice(0, 100), slice(100, 400), slice(400, 442))
FOLDER = Path(__file__).parents[3] / "examples" / "heart" / "data"
HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")


@cache
def silos_of(data: str) -> list[Frame]:
    """Four hospitals, or three parts of a data set of scikit-learn."""
    if data == "diabetes":
        loaded = load_diabetes(scaled=False)
        frame = {**dict(zip(loaded.feature_names, loaded.data.T, strict=True)), "y": loaded.target}
        return [{name: values[part] for name, values in frame.items()} for part in PARTS]
    names = (*HEART, "num")
    found = []
    for hospital in HOSPITALS:
        file = str(FOLDER / f"processed.{hospital}.data")
        columns = {name: ColumnTable(missing=("?",)) for name in names}
        table = read_columns(DataTableTable(file=file, header=names), columns)
        found.append({**table.columns, "disease": (table.columns["num"] > 0) * 1.0})
    return found


@cache
def pooled(data: str) -> Frame:
    """All rows."""
    silos = silos_of(data)
    return {name: np.concatenate([silo[name] for silo in silos]) for name in silos[0]}


def in_turn(frame: Frame, count: int) -> list[Frame]:
    """The rows dealt out to so many silos."""
    return [{name: values[place::count] for name, values in frame.items()} for place in range(count)]


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], int]] = {
    "squared error": ("diabetes", {"rounds": 4, "max_depth": 4}, {}, 0),
    "penalised": (
        "diabetes",
        {"rounds": 3, "max_depth": 3, "reg_alpha": 50.0, "gamma": 2000.0, "min_child_weight": 10.0},
        {"alpha": 50.0, "gamma": 2000.0, "min_child_weight": 10.0},
        0,
    ),
    "counts": (
        "diabetes",
        {"rounds": 6, "max_depth": 3, "objective": "poisson", "reg_alpha": 40.0, "monotone": {"bmi": 1}},
        {"objective": "count:poisson", "alpha": 40.0, "monotone_constraints": (0, 0, 1, *[0] * 7)},
        0,
    ),
    "weights": ("diabetes", {"rounds": 3, "max_depth": 4, "weights": "bp"}, {"min_child_weight": 1.0}, 0),
    "weighted classes": ("heart", {"rounds": 3, "max_depth": 4, "weights": "age"}, {}, 2),
    "missing values": ("heart", {"rounds": 4, "max_depth": 7}, {}, 2),
    "monotone": (
        "heart",
        {"rounds": 4, "max_depth": 3, "monotone": {"age": 1, "thalach": -1, "ca": 1}},
        {"monotone_constraints": tuple({"age": 1, "thalach": -1, "ca": 1}.get(name, 0) for name in HEART)},
        2,
    ),
    "interactions": (
        "heart",
        {"rounds": 3, "max_depth": 3, "interactions": [HEART[:3], ["cp", "chol", "thal", "oldpeak"]]},
        {"interaction_constraints": "[[0, 1, 2], [2, 4, 12, 9]]"},
        2,
    ),
    "more classes": ("heart", {"rounds": 2, "max_depth": 3}, {"num_class": 5}, 5),
}


@pytest.mark.parametrize("alpha", [0.0, 3.3])
def test_gains_are_those_of_xgboost_to_the_last_bit(alpha: float) -> None:
    """Over as much weight as tens of millions of rows have, many cuts gain equally in float32."""
    xgboost = pytest.importorskip("xgboost", reason="xgboost is not installed: it says what the gains are")
    draw = np.random.default_rng(3)
    names = ["a", "b", "c", "w"]
    frame = {name: draw.integers(0, 256, 4000).astype(float) for name in names[:3]}
    frame["w"] = draw.integers(1, 500_000, 4000).astype(float)
    frame["y"] = (frame["a"] + 0.3 * frame["b"] + draw.normal(0, 80, 4000) > 170).astype(float)
    rows = np.column_stack([frame[name] for name in names])
    matrix = xgboost.QuantileDMatrix(rows, frame["y"], weight=frame["w"], feature_names=names, max_bin=64)
    asked = {"base_score": 0.5, "max_depth": 5, "reg_alpha": alpha, "reg_lambda": 1.7}
    parameters = {"objective": "binary:logistic", "tree_method": "hist", "max_bin": 64, "nthread": 1, **asked}
    wanted = trees_of(json.loads(xgboost.train(parameters, matrix, 1).save_raw("json")))[0]
    question = {"outcome": "y", "on": names, "edges": edges_of(matrix), "rounds": 1, "weights": "w", **asked}
    found = trees_of(grow(in_turn(frame, 3), question, described(frame, question, 2)).model)[0]
    for key in ("left_children", "split_indices", "split_conditions", "loss_changes"):
        assert np.array_equal(np.float32(found[key]), np.float32(wanted[key])), key


@pytest.mark.parametrize("case", CASES)
def test_trees_are_those_of_xgboost_on_the_pooled_rows(case: str) -> None:
    xgboost = pytest.importorskip("xgboost", reason="xgboost is not installed: it says what the trees are")
    data, asked, parameters, kinds = CASES[case]
    frame = pooled(data)
    names = HEART if data == "heart" else DIABETES
    outcome = {0: "y", 2: "disease", 5: "num"}[kinds]
    base = 150.0 if kinds == 0 else 0.5
    rows = np.column_stack([frame[name] for name in names])
    weights = frame.get(asked.get("weights"))
    matrix = xgboost.QuantileDMatrix(rows, frame[outcome], weight=weights, feature_names=names, max_bin=24)
    edges = edges_of(matrix)
    objective = {0: "reg:squarederror", 2: "binary:logistic", 5: "multi:softprob"}[kinds]
    wanted = xgboost.train(
        {
            **{"objective": objective, "tree_method": "hist", "max_bin": 24, "base_score": base},
            **{"eta": 0.3, "max_depth": asked["max_depth"], "nthread": 1, **parameters},
        },
        matrix,
        asked["rounds"],
        evals=[(matrix, "all")],
        evals_result=(losses := {}),
        verbose_eval=False,
    )
    question = {"outcome": outcome, "on": names, "edges": edges, "base_score": base, **asked}
    answer = grow(silos_of(data), question, described(frame, question, kinds))
    same_trees(answer.model, json.loads(wanted.save_raw("json")))
    told = losses["all"][answer.values["metric"]]
    assert answer.values["training_loss"][1:] == pytest.approx(told, rel=1e-5)
    loaded = xgboost.Booster(model_file=bytearray(json.dumps(answer.model).encode()))
    plain = xgboost.DMatrix(rows, feature_names=names)
    margins = [each.predict(plain, output_margin=True) for each in (loaded, wanted)]
    assert np.allclose(*margins, rtol=1e-5, atol=1e-5)
    for kind in ("weight", "gain", "cover", "total_gain", "total_cover"):
        told = {name: own[kind] for name, own in answer.values["importance"].items()}
        assert told == pytest.approx(loaded.get_score(importance_type=kind), rel=1e-5)


QUESTION: dict[str, Any] = {"outcome": "disease", "on": HEART, "rounds": 3, "max_depth": 4, "bins": 16}


def test_trees_do_not_depend_on_the_split_the_kernel_or_what_silos_remember(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    columns = described(pooled("heart"), QUESTION, 2)
    found = [grow(in_turn(pooled("heart"), count), QUESTION, columns, 5) for count in (1, 7)]
    silos = silos_of("heart")
    found.append(grow(silos, QUESTION, columns, 5, forgetful=True))
    for kernels in (row_kernels, split_choice, digit_kernels):
        monkeypatch.setattr(kernels, "_library", lambda: None)
    found.append(grow(silos, QUESTION, columns, 5))
    assert found[0].model is not None
    assert all(other.model == found[0].model for other in found)


@pytest.mark.parametrize(("rows", "widths"), [(65537, (2, 3, 5)), (70000, (300, 2)), (900, (17, 256, 2) * 6)])
def test_the_compiled_histograms_are_those_of_numpy(
    rows: int, widths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many rows in one bin, more than a block, and of features that a byte holds and that none does."""
    draw = np.random.default_rng(0)
    columns = [draw.integers(0, width, rows) for width in widths]
    columns[1][:] = 1
    offsets = np.cumsum([0, *widths])
    pairs = np.empty(rows, dtype=row_kernels.PAIR)
    pairs["gradient"] = draw.integers(-(1 << 31), 1 << 31, rows)
    pairs["hessian"] = draw.integers(0, 1 << 31, rows)
    nodes = draw.choice(np.array([3, 4, 4, 4, 5, 9], dtype=np.int32), rows)
    nodes[: min(rows, 66000)] = 4
    asked = AskedNodes(nodes, pairs, np.array([4, 9, 8]), np.array([2, 0, 3]))
    binned = BinnedRows.of(columns, rows, offsets)
    found = NodeHistograms(binned, 4, 2, [asked])
    digits = Digits(20)
    outs = [np.full((8, 4 * binned.width), np.nan, dtype=np.float32) for _ in range(2)]
    assert found.write(digits, outs[0])
    monkeypatch.setattr(row_kernels, "_library", lambda: None)
    assert found.write(digits, outs[1])
    np.testing.assert_array_equal(*outs)


@pytest.mark.parametrize(("outcome", "kinds"), [("disease", 2), ("num", 5)])
def test_trees_are_the_same_with_one_node_a_round(
    outcome: str, kinds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    question = {**QUESTION, "outcome": outcome, "rounds": 2}
    columns = described(pooled("heart"), question, kinds)
    found = [grow([pooled("heart")], question, columns)]
    monkeypatch.setattr(boosting, "_VALUES_A_ROUND", 1)
    found.append(grow([pooled("heart")], question, columns))
    assert found[0].model is not None
    assert found[1].model == found[0].model


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"reg_alpha": 3.0, "gamma": 1.0, "min_child_weight": 2.0},
        {"monotone": (1, -1, 0, 0), "reg_lambda": 0.1},
        {"max_delta_step": 0.7, "min_child_weight": 0.0, "reg_lambda": 0.0},
    ],
)
def test_the_compiled_split_is_that_of_numpy(
    rules: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = np.random.default_rng(8)
    offsets = np.array([0, 5, 7, 20, 25])
    finder = NodeSplits(offsets, Growth(**rules), 2, np.array([2.0**-4, 2.0**-6, 1.0]))
    asked = []
    for _ in range(60):
        bins = [draw.integers(start, stop - (draw.random() < 0.4), 60) for start, stop in pairwise(offsets)]
        rows = np.stack([draw.integers(-40, 40, 60), draw.integers(0, 90, 60), np.ones(60)])
        whole = np.zeros((3, 25))
        for own in bins:
            np.add.at(whole, (slice(None), own), rows)
        asked.append((whole, np.array([-0.5, 0.8]), draw.random(4) < 0.8))
    found = [finder.best(*each) for each in asked]
    monkeypatch.setattr(split_choice, "_library", lambda: None)
    plain = [finder.best(*each) for each in asked]
    assert sum(each is not None for each in plain) > 20
    for one, two in zip(found, plain, strict=True):
        assert repr(one) == repr(two)


def test_no_leaf_holds_fewer_rows_than_the_least_count() -> None:
    frame = pooled("diabetes")
    question = {"outcome": "y", "on": DIABETES, "rounds": 3, "max_depth": 6, "bins": 16}
    columns = described(frame, question)
    smallest = []
    for least in (1, 20):
        answer = grow([frame], question, columns, least)
        # The Hessian of squared error is 1 for each row.
        smallest.append(min(min(tree["sum_hessian"]) for tree in trees_of(answer.model)))
    assert smallest[0] < 20 <= smallest[1]


def test_early_stopping_ends_where_xgboost_does() -> None:
    xgboost = pytest.importorskip("xgboost", reason="xgboost is not installed: it says where it stops")
    frame = pooled("heart")
    held = np.random.default_rng(4).random(len(frame["age"])) < 0.3
    rows = np.column_stack([frame[name] for name in HEART])
    grown = xgboost.QuantileDMatrix(rows[~held], frame["disease"][~held], feature_names=HEART, max_bin=24)
    tested = xgboost.DMatrix(rows[held], frame["disease"][held], feature_names=HEART)
    question = {
        **QUESTION,
        "edges": edges_of(grown),
        "rounds": 60,
        "held_out": 0.3,
        "early_stopping": 5,
        "seed": 4,
    }
    question |= {"base_score": 0.5, "learning_rate": 0.5}
    answer = grow([frame], question, described(frame, question, 2))
    seen: dict[str, Any] = {}
    wanted = xgboost.train(
        {"objective": "binary:logistic", "tree_method": "hist", "max_bin": 24, "base_score": 0.5}
        | {"eta": 0.5, "max_depth": 4, "nthread": 1},
        grown,
        60,
        evals=[(grown, "grown"), (tested, "held")],
        early_stopping_rounds=5,
        evals_result=seen,
        verbose_eval=False,
    )
    assert answer.values["rounds"] == wanted.best_iteration + 1 < 55
    assert len(trees_of(answer.model)) == wanted.best_iteration + 1
    assert answer.values["n_held_out"] == held.sum()
    for mine, theirs in (("training_loss", "grown"), ("held_out_loss", "held")):
        assert np.allclose(answer.values[mine][1:], seen[theirs]["logloss"], rtol=1e-4)


def test_trees_of_hazards_are_those_of_xgboost_without_ties() -> None:
    xgboost = pytest.importorskip("xgboost", reason="xgboost is not installed: it says what the trees are")
    draw = np.random.default_rng(3)
    rows = draw.normal(size=(400, 4))
    rows[draw.random(rows.shape) < 0.1] = np.nan
    order = np.argsort(draw.exponential(size=400) / np.exp(np.nan_to_num(rows) @ [0.8, -0.5, 0.0, 0.3]))
    time = np.empty(400)
    time[order] = np.arange(1.0, 401.0)
    died = (draw.random(400) < 0.7) * 1.0
    names = ["a", "b", "c", "d"]
    frame = {**dict(zip(names, rows.T, strict=True)), "time": time, "died": died}
    question: dict[str, Any] = {"outcome": "time", "event": "died", "every": 1.0, "on": names, "rounds": 4}
    question |= {"max_depth": 3, "held_out": 0.25, "seed": 2}
    held = np.empty(400, dtype=bool)
    for place in range(3):
        own = held[place::3]
        own[:] = np.random.default_rng(2).random(len(own)) < 0.25
    signed = np.where(died == 1, time, -time)
    grown = xgboost.QuantileDMatrix(rows[~held], signed[~held], feature_names=names, max_bin=16)
    tested = xgboost.DMatrix(rows[held], signed[held], feature_names=names)
    seen: dict[str, Any] = {}
    wanted = xgboost.train(
        {"objective": "survival:cox", "tree_method": "hist", "max_bin": 16, "base_score": 1.0}
        | {"eta": 0.3, "max_depth": 3, "nthread": 1},
        grown,
        4,
        evals=[(grown, "grown"), (tested, "held")],
        evals_result=seen,
        verbose_eval=False,
    )
    columns = described(frame, {**question, "on": [*names, "time"], "outcome": "died"}, 2)
    columns["time"] = ColumnTable(least=0, most=400)
    asked = {**question, "edges": edges_of(grown)}
    answer = grow(in_turn(frame, 3), asked, columns)
    same_trees(answer.model, json.loads(wanted.save_raw("json")))
    loaded = xgboost.Booster(model_file=bytearray(json.dumps(answer.model).encode()))
    for matrix in (grown, tested):
        assert np.allclose(loaded.predict(matrix), wanted.predict(matrix), rtol=1e-5)
    for mine, theirs in (("training_loss", "grown"), ("held_out_loss", "held")):
        assert np.allclose(answer.values[mine][1:], seen[theirs]["cox-nloglik"], rtol=1e-5)
    # Coarser times, as the least count asks for, make other trees, and no worse than a little.
    merged = grow(in_turn(frame, 3), {**asked, "every": 40.0}, columns, 5)
    assert merged.values["training_loss"][-1] < merged.values["training_loss"][0] - 0.1


@given(
    st.lists(st.floats(0, 100, width=32) | st.sampled_from([1.0, 2.0, 50.0]), min_size=20, max_size=200),
    st.integers(1, 9),
    st.integers(2, 20),
)
def test_quantile_bins_hold_the_least_count(values: list[float], least: int, bins: int) -> None:
    column = np.array(values, dtype=np.float32)
    edges = even_edges(0.0, 100.0, cells_for(bins))
    for _ in range(SKETCH_ROUNDS - 1):
        edges = refined(edges, count_cells(column, edges), least)
    cuts = quantile_cuts(edges, count_cells(column, edges), least, bins)
    assert len(cuts) <= bins
    held = np.bincount(np.searchsorted(cuts.astype(np.float32), column, side="right"), minlength=len(cuts))
    assert held.sum() == len(column)
    assert held[: len(cuts)].min() >= min(least, len(column))


def test_quantile_bins_of_a_skewed_column_are_about_equally_full() -> None:
    column = np.exp(np.random.default_rng(0).normal(0, 2, 20000)).clip(0, 1e4).astype(np.float32)
    edges = even_edges(0.0, 1e4, cells_for(64))
    for _ in range(SKETCH_ROUNDS - 1):
        edges = refined(edges, count_cells(column, edges), 5)
    cuts = quantile_cuts(edges, count_cells(column, edges), 5, 64)
    held = np.bincount(np.searchsorted(cuts.astype(np.float32), column, side="right"))
    assert len(cuts) == 64
    assert held.max() <= 1.5 * 20000 / 64


@pytest.mark.parametrize(
    ("asked", "error", "words"),
    [
        ({"early_stopping": 3}, ValidationError, "set held_out"),
        ({"monotone": {"year": 1}}, ValidationError, "'year'"),
        ({"edges": {"disease": [1]}}, ValidationError, "'disease'"),
        ({"base_score": 2.0}, ConfigError, "between 0 and 1"),
        ({"edges": {"sex": [1]}}, ConfigError, "'sex' is a category"),
        ({"objective": "poisson"}, ConfigError, "'disease' is a category"),
        ({"weights": "sex"}, ConfigError, "needs a number"),
        ({"weights": "oldpeak"}, ConfigError, "weights are from 0 on"),
        ({"weights": "disease"}, ValidationError, "outcome and weights are both 'disease'"),
        ({"rounds": 2000, "max_depth": 10}, ConfigError, "fewer rounds"),
    ],
)
def test_what_cannot_be_grown_is_refused(asked: dict[str, Any], error: type[Exception], words: str) -> None:
    question = {**QUESTION, **asked}
    columns = described(pooled("heart"), question, 2)
    columns["sex"] = ColumnTable(kind="category", values=(0, 1))
    with pytest.raises(error, match=words):
        grow([pooled("heart")], question, columns)


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("split", (0, 0), split_code(13, 3, False)),
        ("split", (0, 15), 0.0),
        ("done", 0, 4.0),
        ("split", (0, 0), 1e300),
    ],
)
def test_a_silo_goes_down_no_tree_that_is_none(name: str, place: Any, value: float) -> None:
    asked = TypeAdapter(AnyQuestion).validate_python({"ask": "boosted_trees", **QUESTION})
    question = asked.make(described(pooled("heart"), QUESTION, 2), 1, "trees")
    public = {key: np.zeros(shape) for key, shape in question.public.items()}
    public["split"][:] = -1
    public["base"][:] = 0.5
    table = DataTable(pooled("heart"), {})
    question.sums(table, public, GROWING)
    public[name][place] = value
    with pytest.raises(ProtocolError, match="the analysis came with"):
        question.sums(table, public, GROWING)


def test_too_few_rows_of_a_class_have_no_answer() -> None:
    frame = {name: values[:40] for name, values in pooled("heart").items()}
    answer = grow([frame], QUESTION, described(pooled("heart"), QUESTION, 2), 30)
    assert "least count" in answer.why
