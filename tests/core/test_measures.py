"""Metrics with state: parts add up to what the whole gives, by its definition; expressions are bounded."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from roundtable.core import measures
from roundtable.core.config import parse_job
from roundtable.core.errors import ConfigError, TaskError
from roundtable.core.measures.expressions import Undefined, parse_expression
from roundtable.core.measures.families import MOST_CELLS, Family, expanded, families_in, family_of, is_cell

CHANCE = torch.Generator().manual_seed(7)
SCORES = (torch.randint(0, 21, (60,), generator=CHANCE) + 0.5) / 21
LABELS = (torch.rand(60, generator=CHANCE) < 0.2 + 0.6 * SCORES).long()
CLASSES = torch.randint(0, 3, (60,), generator=CHANCE)
GUESSES = torch.where(torch.rand(60, generator=CHANCE) < 0.6, CLASSES, CLASSES.flip(0))
TIMES, EVENTS = torch.randint(1, 9, (60,), generator=CHANCE), torch.rand(60, generator=CHANCE) < 0.7
VALUES = torch.randn(60, generator=CHANCE) * 2 + 5

Part = Callable[[slice], Mapping[str, tuple[float, int]]]


def figures(part: Part, *cuts: slice) -> dict[str, float | None]:
    """Of the sums over all cuts."""
    sums: dict[str, tuple[float, int]] = {}
    for cut in cuts or (slice(None),):
        for name, (value, count) in part(cut).items():
            before = sums.get(name, (0.0, 0))
            sums[name] = before[0] + value, before[1] + count
    (family,) = families_in(sums)
    return family.figures(sums)


HALVES = (slice(0, 17), slice(17, 60))
PARTS: dict[str, Part] = {
    "confusion": lambda cut: measures.confusion("m", GUESSES[cut], CLASSES[cut], 3),
    "ranking": lambda cut: measures.auroc("m", SCORES[cut], LABELS[cut], bins=21),
    "calibration": lambda cut: measures.calibration("m", SCORES[cut], LABELS[cut], bins=10),
    "regression": lambda cut: measures.regression("m", VALUES[cut] + SCORES[cut], VALUES[cut]),
    "correlation": lambda cut: measures.correlation("m", VALUES[cut] + SCORES[cut], TIMES[cut]),
    "quantiles": lambda cut: measures.quantiles("m", VALUES[cut], -1.5, 11.0, bins=100),
}


@pytest.mark.parametrize("kind", list(PARTS))
def test_sums_over_batches_and_silos_give_the_figure_of_all(kind: str) -> None:
    assert figures(PARTS[kind], *HALVES) == pytest.approx(figures(PARTS[kind]))


def test_confusion_is_that_of_its_definition() -> None:
    found = figures(PARTS["confusion"])
    precision, recall, f1 = [], [], []
    for c in range(3):
        right = int(((c == GUESSES) & (c == CLASSES)).sum())
        precision.append(right / int((c == GUESSES).sum()))
        recall.append(right / int((c == CLASSES).sum()))
        f1.append(2 * precision[-1] * recall[-1] / (precision[-1] + recall[-1]))
    assert found["m_precision_macro"] == pytest.approx(sum(precision) / 3)
    assert found["m_recall_macro"] == pytest.approx(sum(recall) / 3)
    assert found["m_f1_macro"] == pytest.approx(sum(f1) / 3)
    assert (
        found["m_accuracy"]
        == found["m_f1_micro"]
        == pytest.approx(float((GUESSES == CLASSES).float().mean()))
    )
    # By hand: class 1 occurs and is never predicted, class 2 neither.
    few = figures(lambda _: measures.confusion("m", torch.zeros(4).long(), torch.tensor([0, 0, 1, 1]), 3))
    assert (few["m_precision_macro"], few["m_recall_macro"]) == (0.25, 0.5)
    assert few["m_f1_macro"] == pytest.approx(1 / 3)


def test_areas_are_those_of_all_pairs_and_thresholds() -> None:
    found = figures(PARTS["ranking"])
    positive, negative = SCORES[LABELS == 1], SCORES[LABELS == 0]
    pairs = (positive[:, None] > negative).float() + (positive[:, None] == negative).float() / 2
    assert found["m_auroc"] == pytest.approx(float(pairs.mean()))
    precision = recall = 0.0
    for threshold in SCORES.unique().flip(0):
        chosen = threshold <= SCORES
        reached = float(LABELS[chosen].sum() / LABELS.sum())
        precision += float(LABELS[chosen].float().mean()) * (reached - recall)
        recall = reached
    assert found["m_average_precision"] == pytest.approx(precision)
    # By hand, as scikit-learn's own example: y = 0 0 1 1, scores 0.1 0.4 0.35 0.8.
    own = measures.auroc("m", torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1]), bins=100)
    assert figures(lambda _: own) == {"m_auroc": 0.75, "m_average_precision": pytest.approx(0.8333333)}


def test_errors_calibration_quantiles_and_concordance_are_those_of_their_definitions() -> None:
    error = SCORES.double()
    spread = (VALUES.double() - VALUES.double().mean()).square().sum()
    found = figures(PARTS["regression"])
    assert found["m_rmse"] == pytest.approx(float(error.square().mean().sqrt()), rel=1e-6)
    assert found["m_mae"] == pytest.approx(float(error.mean()), rel=1e-6)
    assert found["m_r2"] == pytest.approx(float(1 - error.square().sum() / spread), rel=1e-6)
    r = np.corrcoef((VALUES + SCORES).double().numpy(), TIMES.numpy())[0, 1]
    assert figures(PARTS["correlation"])["m_pearson"] == pytest.approx(r, rel=1e-6)
    gaps = 0.0
    for i in range(10):
        inside = (SCORES.double() * 10).long() == i
        if inside.any():
            gaps += abs(float(SCORES[inside].double().mean() - LABELS[inside].double().mean())) * int(
                inside.sum()
            )
    assert figures(PARTS["calibration"])["m_ece"] == pytest.approx(gaps / 60, rel=1e-6)
    for percent in (5, 25, 50, 75, 95):
        exact = float(np.quantile(VALUES.double().numpy(), percent / 100, method="inverted_cdf"))
        assert figures(PARTS["quantiles"])[f"m_p{percent}"] == pytest.approx(exact, abs=0.126)
    concordant = comparable = 0.0
    for i in range(60):
        for j in range(60):
            if EVENTS[i] and (TIMES[i] < TIMES[j] or (TIMES[i] == TIMES[j] and not EVENTS[j])):
                comparable += 1
                concordant += 1 if SCORES[i] > SCORES[j] else 0.5 if SCORES[i] == SCORES[j] else 0
    own = figures(lambda _: measures.concordance("m", SCORES, TIMES, EVENTS))
    assert own == {"m_c_index": pytest.approx(concordant / comparable)}


def test_what_is_not_defined_is_no_number() -> None:
    one_class = measures.auroc("m", torch.tensor([0.2, 0.8]), torch.tensor([1, 1]))
    assert figures(lambda _: one_class) == {"m_auroc": None, "m_average_precision": 1.0}
    nobody = torch.zeros(0)
    assert set(figures(lambda _: measures.regression("m", nobody, nobody)).values()) == {None}
    flat = measures.correlation("m", torch.full((3,), 0.1), torch.arange(3))
    assert figures(lambda _: flat) == figures(lambda _: measures.correlation("m", nobody, nobody))
    alike = measures.regression("m", torch.ones(3), torch.ones(3))
    assert figures(lambda _: alike) == {"m_rmse": 0.0, "m_mae": 0.0, "m_r2": None}


def test_hostile_sums_give_no_figure_and_no_error() -> None:
    names = ["x..regression_1..y", "x..regression_1..yy", "q..quantiles_3_0_1e999..0", "c..confusion_16..0_0"]
    for value in (1e300, -1e300, 0.0):
        sums = dict.fromkeys(names, (value, 3))
        for family in families_in(sums):
            assert all(v is None or math.isfinite(v) for v in family.figures(sums).values())
    assert family_of("q..quantiles_3_nan_1") is None


def refused(call: Callable[[], object], why: str) -> None:
    with pytest.raises(TaskError, match=why):
        call()


def test_mistakes_of_a_task_are_named() -> None:
    ones: Tensor = torch.ones(3)
    refused(lambda: measures.auroc("m", ones * 3, ones), "values from 3 to 3, where 0 to 1")
    refused(lambda: measures.auroc("m", ones * math.nan, ones), "3 values are not finite")
    refused(lambda: measures.auroc("m", ones, ones[:2]), "3 values beside 2")
    refused(lambda: measures.auroc("m", ones[None], ones), r"shape \[1, 3\]")
    refused(lambda: measures.confusion("m", ones, ones * 5, 3), "class 5 to 5 is among")
    refused(lambda: measures.confusion("m", ones, ones, 17), f"289 cells; 1 to {MOST_CELLS}")
    refused(lambda: measures.quantiles("m", ones, 2.0, 1.0), "two ends")


def test_names_tell_what_is_to_be_made_of_sums_and_bounds_name_all_of_them() -> None:
    family = Family("risk", "quantiles", 4, (-0.5, 1e-7))
    assert family_of(family.key("3")) == family_of(family.prefix) == family
    assert is_cell(family.key("3"))
    assert not any(map(is_cell, ("risk", "risk..ranking_20", "a..b..c", "..", "a..ranking_999..x")))
    bounds = expanded({"loss": 3.0, "risk..ranking_2": 1.0})
    cells = [
        "risk..ranking_2..pos_0",
        "risk..ranking_2..pos_1",
        "risk..ranking_2..neg_0",
        "risk..ranking_2..neg_1",
    ]
    assert bounds == {"loss": 3.0, **dict.fromkeys(cells, 1.0)} == expanded(bounds)


SUMS = {"tp": (6.0, 20), "fp": (2.0, 20), "fn": (4.0, 20), "loss": (30.0, 20), "none": (0.0, 0)}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2*tp/(2*tp+fp+fn)", 12 / 18),
        ("tp - fp - fn", 0.0),
        ("tp / fp / fn", 0.75),
        ("-2^2", -4.0),
        ("2^-1 * 2^3^2", 256.0),
        ("sqrt(mean(loss)) + count(tp)", math.sqrt(1.5) + 20),
        ("max(tp, fn) - min(1e1, abs(-3.5))", 2.5),
        (" ( tp ) ", 6.0),
    ],
)
def test_expressions(text: str, value: float) -> None:
    assert parse_expression(text)(SUMS) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("tp/(fp-2)", "divides by zero"),
        ("sqrt(fp-tp)", "domain"),
        ("tp^1000", "out of range"),
        ("(fp-tp)^0.5", "raises -4 to 0.5"),
        ("mean(none)", "over no example"),
        ("tp/missing", "no silo measured 'missing'"),
        ("1e999 * tp", "is inf"),
    ],
)
def test_what_has_no_value_says_why(text: str, why: str) -> None:
    with pytest.raises(Undefined, match=why):
        parse_expression(text)(SUMS)


@pytest.mark.parametrize(
    "text",
    [
        *("", "tp fp", "tp +", "(tp", "tp)", "tp**2", "tp.__class__(1)", "eval(tp)", "count(2)", "min(tp)"),
        *("__import__('os')", "tp; fp", "tp if fp else 1", "1,2", "-" * 99 + "tp", "t" * 301),
        "(" * 99 + "tp" + ")" * 99,
    ],
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_expression(text)


@given(st.text(st.sampled_from("ab1.+-*/^(), cmsqrtn"), max_size=40))
def test_any_text_is_an_expression_or_refused(text: str) -> None:
    try:
        expression = parse_expression(text)
    except ValueError:
        return
    try:
        assert math.isfinite(expression(dict.fromkeys(expression.names, (2.0, 3))))
    except Undefined:
        return


@pytest.mark.parametrize(
    ("metrics", "why"),
    [
        ('f1 = "2*tp/("', "expected a number, a metric or '\\(' at its end"),
        ('f1 = "1 + 1"', "names no metric"),
        ('a = "tp"\nb = "a + 1"', "worked out here too"),
    ],
)
def test_a_job_names_the_mistake(metrics: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_job(f'task = "t"\n[metrics]\n{metrics}\n')


def test_all_cells_of_a_family_name_one_and_the_same() -> None:
    # Each silo's sums are asked cell by cell: making a family anew for each took 20 ms for one of 100 cells.
    family = Family("risk", "ranking", 50)
    assert len({id(family_of(family.key(cell))) for cell in family.cells}) == 1
    assert family_of(family.prefix) == family
