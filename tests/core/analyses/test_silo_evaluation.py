"""Each silo's evaluation is scikit-learn's of its rows; what would tell of a silo's few rows is hidden."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
from pydantic import ValidationError
from sklearn.metrics import (
    average_precision_score,
    brier_score_loss,
    confusion_matrix,
    log_loss,
    roc_auc_score,
)

from roundtable.core.algorithms.analysis import AnalysisTable
from roundtable.core.analyses.question import Answer
from roundtable.core.errors import AggregationError, ConfigError
from roundtable.core.tables.table_reading import DataTable
from tests.core.analyses.test_pooled_results import ask, close

NAMES = ("alder", "birch", "cedar", "doum")
COLUMNS = {"p": {"least": 0, "most": 1}, "ill": {"kind": "category", "values": ["no", "yes"]}}
ASKED = {"ask": "evaluate", "score": "p", "outcome": "ill", "by_silo": True, "bins": 4}
Rows = dict[str, np.ndarray]
Lie = Callable[[dict[str, Any]], None]


def rows_of(*sizes: int) -> list[Rows]:
    """Scores on the grid of thousandths, that tell more at some silos than at others."""
    found = []
    for number, size in enumerate(sizes):
        draw = np.random.default_rng(number)
        p = np.round(draw.uniform(0.02, 0.98, size), 3)
        found.append({"p": p, "ill": (draw.random(size) < 0.5 + (p - 0.5) * (1 - number / 6)) * 1.0})
    return found


def survey_of(silos: int, least: int, columns: Any = COLUMNS, **change: Any) -> Any:
    named = {"silos": {name: name for name in NAMES[:silos]}, "least_count": least}
    asked = {"table": "people", "columns": columns, "questions": [{**ASKED, **change}], **named}
    return AnalysisTable.model_validate({"name": "analysis", **asked}).survey


def answered(silos: list[Rows], least: int = 5, lie: Lie | None = None, **change: Any) -> Answer:
    """By digits as they travel; the second silo's may be changed in the last round."""
    survey = survey_of(len(silos), least, **change)
    public = {name: np.zeros(shape) for name, shape in survey.public_places.shapes.items()}
    for round in range(2):
        digits: list[Any] = []
        for number, rows in enumerate(silos):
            sums = survey.sums(DataTable(rows, survey.columns), public, None, number)
            if lie is not None and number == 1 and round == 1:
                lie(sums)
            digits.append(survey.sum_places.encode(sums).double())
        found = survey.sum_places.decode((sum(digits) / len(silos)).float(), len(silos))
        public = survey.step({**public, "silos": np.array([float(len(silos))])}, found)
    return cast("Answer", survey.answers(public)[0])


def test_each_silos_figures_are_those_of_its_rows_and_the_pooled_ones_of_all() -> None:
    silos = rows_of(150, 200, 300, 120)
    answer = answered(silos, 1)
    found = answer.values["silos"]
    for name, rows in zip(NAMES, silos, strict=True):
        p, ill, own = rows["p"], rows["ill"], found[name]
        close(
            [own["auroc"], own["auprc"], own["brier"], own["log_loss"]],
            [
                roc_auc_score(ill, p),
                average_precision_score(ill, p),
                brier_score_loss(ill, p),
                log_loss(ill, p),
            ],
        )
        assert own["confusion"] == confusion_matrix(ill, p >= 0.5).tolist()
        bins = [(p > low) & (p <= low + 0.25) for low in (0, 0.25, 0.5, 0.75)]
        close([each["observed"] for each in own["calibration"]], [ill[each].mean() for each in bins])
        close([each["predicted"] for each in own["calibration"]], [p[each].mean() for each in bins])
        for each in own["decision"]:
            told, odds = p > each["threshold"], each["threshold"] / (1 - each["threshold"])
            close([each["net_benefit"]], [(ill[told].sum() - (1 - ill[told]).sum() * odds) / len(p)])
        low, high = own["auroc_interval"]
        assert low < own["auroc"] < high
    whole = ask(silos, {k: v for k, v in ASKED.items() if k != "by_silo"}, ("ill",), ranges={"p": (0.0, 1.0)})
    pooled = {key: value for key, value in answer.values.items() if key not in ("silos", "differences")}
    assert pooled == whole.values
    aurocs = [each["auroc"] for each in found.values()]
    assert answer.values["differences"]["auroc"] == max(aurocs) - min(aurocs)
    assert [row[0] for row in answer.rows] == ["all", *NAMES]


def test_scores_that_are_no_probabilities_have_the_figures_of_ranks() -> None:
    silos = [{**rows, "p": rows["p"] * 10 - 3} for rows in rows_of(90, 80, 70)]
    columns = {**COLUMNS, "p": {"least": -3, "most": 7}}
    found = answered(silos, 1, columns=columns, every=0.01).values["silos"]
    close([found["alder"]["auroc"]], [roc_auc_score(silos[0]["ill"], silos[0]["p"])])
    assert "brier" not in found["alder"]


def test_a_silo_with_few_rows_is_hidden_with_as_many_others_as_hide_it() -> None:
    silos = rows_of(150, 60, 300, 120)
    silos[1]["ill"][:] = 0.0
    silos[1]["ill"][:3] = 1.0
    answer = answered(silos)
    found = answer.values["silos"]
    assert [name for name in NAMES if found[name] is None] == ["birch", "doum"]
    assert "birch, doum: too few rows" in answer.notes[-1]
    # What is left of all rows is of two silos, and no calibration curve is told of the others.
    assert found["alder"]["auroc"] is not None
    assert (found["alder"]["calibration"], found["alder"]["decision"]) == ([], [])
    assert answer.values["calibration"]


def test_no_sum_over_silos_gives_a_hidden_bin_or_cell() -> None:
    silos = rows_of(400, 400, 400)
    high = silos[0]["p"] > 0.75
    silos[0]["ill"][high] = 1.0
    silos[0]["ill"][np.flatnonzero(high)[:2]] = 0.0
    answer = answered(silos, threshold=0.75)
    found = answer.values["silos"]
    assert [each["confusion"][0][1] for each in found.values()].count(None) == 2
    assert found["alder"]["confusion"] == [[None, None], [None, None]]
    told = {each["from"] for each in answer.values["calibration"]}
    of_silos = [{each["from"] for each in values["calibration"]} for values in found.values()]
    assert 0.75 in told
    assert all(each == of_silos[0] and 0.75 not in each for each in of_silos)


def too_good(sums: dict[str, Any]) -> None:
    sums["0.own"][1, 2] = 1.5


def more_rows(sums: dict[str, Any]) -> None:
    sums["0.own"][1, :2] *= 100
    sums["0.own"][1, 6:10] *= 100


def of_another(sums: dict[str, Any]) -> None:
    sums["0.own"][0] = sums["0.own"][1]


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        (too_good, "birch are no figures of its rows"),
        (more_rows, "own rows are not those of all together"),
        (of_another, "a silo sent something else"),
    ],
)
def test_figures_that_no_rows_have_are_refused(lie: Lie, said: str) -> None:
    with pytest.raises(AggregationError, match=said):
        answered(rows_of(150, 200, 300), 1, lie)


def test_what_cannot_be_asked_is_refused() -> None:
    with pytest.raises(ValidationError, match="by = 'sex' and by_silo"):
        survey_of(3, 5, by="sex")
    with pytest.raises(ConfigError, match="goes by the silos' names"):
        survey_of(0, 5)
