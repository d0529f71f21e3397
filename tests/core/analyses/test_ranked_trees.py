"""Trees that rank are those of xgboost on the pooled rows, whose queries lie within a silo each."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from grown_silos import Frame, described, edges_of, grow, same_trees
from pydantic import TypeAdapter, ValidationError

from roundtable.core.analyses.boosted_trees import ranking_objectives
from roundtable.core.analyses.boosted_trees.ranking_objectives import NdcgRanking, PairwiseRanking, ndcg
from roundtable.core.analyses.questions_table import AnyQuestion
from roundtable.core.errors import ConfigError, TaskError
from roundtable.core.tables.table_description import ColumnTable

ON = ("a", "b", "c", "d")
SIZES = (40, 3, 1, 25, 90, 12, 12, 7, 33, 2, 60, 18, 5, 5, 44, 29, 12, 40)


def searched(silos: int) -> list[Frame]:
    """Queries dealt out to so many silos, each a whole one; numbers of queries begin anew at each silo."""
    draw = np.random.default_rng(5)
    found: list[list[Frame]] = [[] for _ in range(silos)]
    for place, size in enumerate(SIZES):
        rows = np.round(draw.normal(size=(size, len(ON))), 1)
        rows[draw.random(rows.shape) < 0.1] = np.nan
        score = np.nan_to_num(rows) @ [1.0, -0.7, 0.3, 0.0] + draw.normal(size=size)
        relevance = np.digitize(score, [-0.5, 0.8, 1.8]).astype(np.float64)
        query = np.full(size, float(place // silos))
        own = {**dict(zip(ON, rows.T, strict=True)), "relevance": relevance, "query": query}
        found[place % silos].append(own)
    return [{name: np.concatenate([own[name] for own in part]) for name in part[0]} for part in found]


def columns_of(frame: Frame) -> dict[str, ColumnTable]:
    columns = described(frame, {"on": ON, "outcome": "relevance"})
    return {**columns, "relevance": ColumnTable(least=0, most=3), "query": ColumnTable()}


QUESTION: dict[str, Any] = {"outcome": "relevance", "query": "query", "on": ON, "rounds": 6, "max_depth": 4}


@pytest.mark.parametrize(
    ("objective", "top"),
    [("rank_ndcg", None), ("rank_pairwise", None), ("rank_ndcg", 4), ("rank_pairwise", 200)],
)
def test_trees_are_those_of_xgboost_on_the_pooled_rows(objective: str, top: int | None) -> None:
    """Held-out queries among them, on which NDCG is told; the file loads and predicts as xgboost's own."""
    xgboost = pytest.importorskip("xgboost", reason="xgboost is not installed: it says what the trees are")
    silos = searched(3)
    question = {**QUESTION, "objective": objective, "held_out": 0.3, "seed": 2}
    question |= {} if top is None else {"top": top}
    held = []
    for silo in silos:
        names, place = np.unique(silo["query"], return_inverse=True)
        held.append((np.random.default_rng(2).random(len(names)) < 0.3)[place])
    out = np.concatenate(held)
    frame = {name: np.concatenate([silo[name] for silo in silos]) for name in silos[0]}
    number = np.concatenate([silo["query"] + 100 * place for place, silo in enumerate(silos)])
    rows = np.column_stack([frame[name] for name in ON])
    made = {
        key: xgboost.QuantileDMatrix(
            rows[part], frame["relevance"][part], qid=number[part], feature_names=ON, max_bin=16, ref=ref
        )
        for key, part, ref in (("grown", ~out, None),)
    }
    grown = made["grown"]
    tested = xgboost.DMatrix(rows[out], frame["relevance"][out], qid=number[out], feature_names=ON)
    seen: dict[str, Any] = {}
    wanted = xgboost.train(
        {"objective": objective.replace("_", ":"), "tree_method": "hist", "max_bin": 16, "base_score": 0.0}
        | {"eta": 0.3, "max_depth": 4, "nthread": 1}
        | ({} if top is None else {"lambdarank_num_pair_per_sample": top}),
        grown,
        6,
        evals=[(grown, "grown"), (tested, "held")],
        evals_result=seen,
        verbose_eval=False,
    )
    answer = grow(silos, {**question, "edges": edges_of(grown)}, columns_of(frame))
    same_trees(answer.model, json.loads(wanted.save_raw("json")))
    metric = answer.values["metric"]
    assert metric == f"ndcg@{top or 32}"
    for mine, theirs in (("training_loss", "grown"), ("held_out_loss", "held")):
        assert answer.values[mine][1:] == pytest.approx(seen[theirs][metric], rel=1e-6)
    loaded = xgboost.Booster(model_file=bytearray(json.dumps(answer.model).encode()))
    for matrix in (grown, tested):
        assert np.allclose(loaded.predict(matrix), wanted.predict(matrix), rtol=1e-5, atol=1e-6)
    assert loaded.eval(tested) == wanted.eval(tested, iteration=0)


def test_boosting_stops_at_the_highest_ndcg_as_xgboost_does() -> None:
    xgboost = pytest.importorskip("xgboost", reason="xgboost is not installed: it says where it stops")
    [frame] = searched(1)
    names, place = np.unique(frame["query"], return_inverse=True)
    held = (np.random.default_rng(1).random(len(names)) < 0.4)[place]
    rows = np.column_stack([frame[name] for name in ON])
    grown = xgboost.QuantileDMatrix(
        rows[~held], frame["relevance"][~held], qid=frame["query"][~held], feature_names=ON, max_bin=16
    )
    tested = xgboost.DMatrix(rows[held], frame["relevance"][held], qid=frame["query"][held], feature_names=ON)
    wanted = xgboost.train(
        {"objective": "rank:ndcg", "tree_method": "hist", "max_bin": 16, "base_score": 0.0}
        | {"eta": 0.3, "max_depth": 4, "nthread": 1},
        grown,
        40,
        evals=[(tested, "held")],
        early_stopping_rounds=4,
        verbose_eval=False,
    )
    question = {**QUESTION, "objective": "rank_ndcg", "held_out": 0.4, "seed": 1, "early_stopping": 4}
    answer = grow([frame], {**question, "rounds": 40, "edges": edges_of(grown)}, columns_of(frame))
    assert answer.values["rounds"] == wanted.best_iteration + 1 < 36
    told = answer.values["held_out_loss"]
    assert told[answer.values["rounds"]] == max(told[1:])


def test_trees_do_not_depend_on_which_silo_has_a_query_or_on_what_silos_remember(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor on rows of different queries that lie between each other, or on queries that are taken together."""
    question = {**QUESTION, "objective": "rank_ndcg", "bins": 16, "rounds": 3}
    silos = searched(1)
    columns = columns_of(silos[0])
    found = [grow(silos, question, columns, 5), grow(searched(3), question, columns, 5)]
    found.append(grow(silos, question, columns, 5, forgetful=True))
    order = np.argsort(
        np.random.default_rng(0).random(len(SIZES))[silos[0]["query"].astype(int)], kind="stable"
    )
    between = np.argsort(np.arange(len(order)) % 7, kind="stable")
    mixed = order[between]
    # Equal margins keep the order of rows, so within a query it is what it was.
    for query in range(len(SIZES)):
        own = silos[0]["query"][mixed] == query
        mixed[own] = np.sort(mixed[own])
    found.append(grow([{name: values[mixed] for name, values in silos[0].items()}], question, columns, 5))
    monkeypatch.setattr(ranking_objectives, "_AT_ONCE", 1)
    found.append(grow(silos, question, columns, 5))
    assert found[0].model is not None
    assert all(other.model == found[0].model for other in found)


def pushed(margins: Any, relevance: Any, top: int, by_ndcg: bool) -> tuple[Any, Any]:
    """Gradients and Hessians of one query, pair by pair."""
    order = sorted(range(len(margins)), key=lambda row: -margins[row])
    gains, place = [2.0**value - 1 for value in relevance], 1 / np.log2(np.arange(len(margins)) + 2)
    ideal = sum(gain * own for gain, own in zip(sorted(gains, reverse=True)[:top], place, strict=False))
    g, h, total = np.zeros(len(margins)), np.zeros(len(margins)), 0.0
    for i in range(min(top, len(order))):
        for j in range(i + 1, len(order)):
            high, low, gap = order[i], order[j], abs(place[i] - place[j])
            if relevance[high] == relevance[low]:
                continue
            if relevance[high] < relevance[low]:
                high, low = low, high
            change = abs(gains[high] - gains[low]) * gap / ideal if by_ndcg else 1.0
            apart = margins[high] - margins[low]
            if max(margins) != min(margins):
                change /= abs(apart) + 0.01
            chance = 1 / (1 + np.exp(-apart))
            g[high] -= (1 - chance) * change
            g[low] += (1 - chance) * change
            h[[high, low]] += 2 * chance * (1 - chance) * change
            total += 2 * (1 - chance) * change
    scale = np.log2(1 + total) / total if total else 1.0
    return g * scale, h * scale


@pytest.mark.parametrize("top", [1, 4, 32])
def test_gradients_are_sums_over_pairs(top: int) -> None:
    draw = np.random.default_rng(top)
    sizes = [1, 2, 9, 9, 30]
    queries = np.repeat(np.arange(5.0), sizes)
    relevance = draw.integers(0, 4, len(queries)).astype(np.float32)
    relevance[queries == 3] = 0.0
    margins = np.round(draw.normal(size=len(queries)), 1).astype(np.float32)
    margins[queries == 2] = 0.5
    for made in (NdcgRanking(top=top), PairwiseRanking(top=top)):
        found = made.gradients(margins[:, None], relevance, queries[:, None])
        for query in range(5):
            own = queries == query
            wanted = pushed(
                margins[own].astype(float).tolist(),
                relevance[own].tolist(),
                top,
                isinstance(made, NdcgRanking),
            )
            for one, two in zip(found, wanted, strict=True):
                assert one[own, 0] == pytest.approx(two, rel=2e-5, abs=2e-6)
    assert ndcg(margins[queries == 3], relevance[queries == 3], queries[queries == 3], top) == 1.0


@pytest.mark.parametrize(
    ("asked", "error", "words"),
    [
        ({"query": None}, ValidationError, "go together"),
        ({"objective": "poisson"}, ValidationError, "go together"),
        ({"objective": "squared_error", "query": None, "top": 3}, ValidationError, "top is of rankings"),
        ({"weights": "a"}, ValidationError, "weights and query do not go together"),
        ({"on": ["a", "query"]}, ValidationError, "'query' twice"),
        ({"outcome": "b", "on": ["a"]}, ConfigError, "relevance is a whole number from 0 to 31"),
        ({"query": "ward"}, ConfigError, "no column 'ward'"),
    ],
)
def test_what_cannot_be_ranked_is_refused(asked: dict[str, Any], error: type[Exception], words: str) -> None:
    [frame] = searched(1)
    question = {**QUESTION, "objective": "rank_ndcg", **asked}
    question = {name: value for name, value in question.items() if value is not None}
    with pytest.raises(error, match=words):
        grow([frame], question, columns_of(frame))


def test_a_silo_refuses_fractions_and_a_query_of_too_many_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message leaves the silo: it names the column, and no value."""
    [frame] = searched(1)
    question = {**QUESTION, "objective": "rank_pairwise", "top": 2}
    for name, value in (("relevance", 1.25), ("query", 0.5), ("query", 2.0**53)):
        changed = {**frame, name: np.where(np.arange(len(frame["a"])) == 9, value, frame[name])}
        with pytest.raises(TaskError, match=f"column '{name}' has a value that is no whole number") as caught:
            grow([changed], question, columns_of(frame))
        assert str(value) not in str(caught.value)
    monkeypatch.setattr(ranking_objectives, "MOST_PAIRS", 100)
    with pytest.raises(TaskError, match="a smaller top"):
        grow([frame], question, columns_of(frame))


def test_few_queries_have_no_answer_though_they_have_many_rows() -> None:
    """Each silo's NDCG over a handful of queries would tell of one."""
    silos = searched(1)
    columns = columns_of(silos[0])
    question = {**QUESTION, "objective": "rank_ndcg", "rounds": 1}
    few = silos[0]["query"] < 4
    answer = grow([{name: values[few] for name, values in silos[0].items()}], question, columns, 5)
    assert "least count" in answer.why
    answer = grow(silos, {**question, "held_out": 0.05, "seed": 3}, columns, 5)
    assert "least count" in answer.why


def test_rankings_are_refused_under_noise() -> None:
    """A row changes the gradients of all rows of its query, and the unit of privacy is one row."""
    question = TypeAdapter(AnyQuestion).validate_python(
        {"ask": "boosted_trees", **QUESTION, "objective": "rank_ndcg"}
    )
    [frame] = searched(1)
    with pytest.raises(ConfigError, match="changes the gradients of its whole query"):
        question.make_noisy(columns_of(frame), "ranks")
