"""A silo that sends possible sums of other rows moves a median of means by less than honest silos differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from scipy import stats

from roundtable.client.analysis_task import AnalysisTask
from roundtable.core.algorithms.analysis import AnalysisTable
from roundtable.core.analyses.question import Answer
from roundtable.core.errors import AggregationError, ConfigError, PrivacyError
from roundtable.core.initial_model import initial_model
from roundtable.core.tables.table_reading import DataTable
from roundtable.engine.analysis_job import analysis_job
from roundtable.server.jobs.plain_rounds import PlainRounds
from roundtable.simulation import simulate

NAMES = ("alder", "birch", "cedar", "doum", "elm")
COLUMNS = {
    "age": {"least": 0, "most": 100},
    "ill": {"kind": "category", "values": ["no", "yes"]},
}
ROBUST = {"ask": "describe", "columns": ["age"], "pooling": "median_of_means"}
Rows = dict[str, np.ndarray]
Lie = Callable[[dict[str, Any], int], None]


def table_of(question: dict[str, Any], names: Sequence[str] = NAMES, least: int = 5) -> AnalysisTable:
    asked = {"name": "analysis", "table": "people", "columns": COLUMNS, "questions": [question]}
    known = {"silos": {name: name for name in names}, "least_count": least}
    return AnalysisTable.model_validate({**asked, **known})


def rows_of(silos: int = 5, shift: float = 0.0) -> list[Rows]:
    found = []
    for number in range(silos):
        draw = np.random.default_rng(number)
        age = np.clip(draw.normal(50 + shift * number, 10, 60 + 20 * number), 0, 100)
        age[3] = np.nan
        found.append({"age": age, "ill": (draw.random(len(age)) < 0.4) * 1.0})
    return found


def honest(sums: dict[str, Any], round: int) -> None:
    return


def as_if_a_hundred(sums: dict[str, Any], round: int) -> None:
    """Sums of rows that are all at the range's end, ten times as many as there are."""
    if round == 1:
        sums["0.present"] *= 10
    if round > 1:
        many = 10.0 * 59
        away = 1.0 if round == 2 else 0.99
        own = sums["0.first"] != 0
        sums["0.first"][own], sums["0.second"][own] = many * away, (round == 3) * many * away**2


def answered(
    question: dict[str, Any], silos: list[Rows], lie: Lie = honest, liar: int = 0, least: int = 5
) -> Answer:
    """Over these silos, of which one's sums are changed, by digits as they travel."""
    survey = table_of(question, NAMES[: len(silos)], least).survey
    public = {name: np.zeros(shape) for name, shape in survey.public_places.shapes.items()}
    kept = {name: np.zeros(shape) for name, shape in survey.kept_places.shapes.items()}
    for round in range(1, survey.rounds + 1):
        digits = []
        for number, rows in enumerate(silos):
            sums = cast("dict[str, Any]", survey.sums(DataTable(rows, survey.columns), public, None, number))
            if number == liar:
                lie(sums, round)
            digits.append(survey.sum_places.encode(sums))
        mean = sum(each.double() for each in digits) / len(silos)  # type: ignore[union-attr]
        found = survey.sum_places.decode(mean.float(), len(silos))  # type: ignore[union-attr]
        after = survey.step({**public, **kept, "silos": np.array([float(len(silos))])}, found)
        public, kept = ({name: after[name] for name in each} for each in (public, kept))
        if not survey.open(public):
            break
    return survey.answers({**public, "silos": np.array([float(len(silos))])})[0]


def test_it_is_the_median_of_the_groups_means_with_its_interval() -> None:
    silos = rows_of()
    survey = table_of(ROBUST).survey
    members = cast("Any", survey.questions[0]).members
    assert sorted(map(len, members)) == [1, 2, 2]
    assert sorted(name for group in members for name in group) == list(NAMES)
    groups = [np.concatenate([silos[NAMES.index(name)]["age"] for name in group]) for group in members]
    means = np.array([np.nanmean(each) for each in groups])
    found = answered(ROBUST, silos).values["age"]["all"]
    variance = np.median([np.nanvar(each, ddof=1) for each in groups])
    assert np.allclose([found["mean"], found["variance"]], [np.median(means), variance], rtol=1e-12)
    assert found["count"] == sum(len(rows["age"]) - 1 for rows in silos)
    assert (found["missing"], found["groups"], found["far"]) == (5, 3, [])
    roots = np.sort(np.sqrt([(~np.isnan(each)).sum() for each in groups]))
    spread = max(
        np.sqrt(variance) * 2 / roots[:2].sum(), 1.4826 * np.median(np.abs(means - np.median(means)))
    )
    reach = spread * (stats.norm.ppf(0.975) * np.sqrt(np.pi / 4) + stats.norm.ppf(3 / 4))
    assert np.allclose(found["interval"], [np.median(means) - reach, np.median(means) + reach], rtol=1e-12)


@pytest.mark.parametrize("liar", range(5))
def test_a_liar_moves_it_less_than_honest_silos_differ(liar: int) -> None:
    silos, robust = rows_of(shift=0.5), {**ROBUST, "groups": 5}
    others = [np.nanmean(rows["age"]) for number, rows in enumerate(silos) if number != liar]
    spread = max(others) - min(others)
    plain = {**ROBUST, "pooling": "sum"}
    moved = [
        abs(
            answered(asked, silos, as_if_a_hundred, liar).values["age"]["all"]["mean"]
            - answered(asked, silos).values["age"]["all"]["mean"]
        )
        for asked in (plain, robust)
    ]
    assert moved[0] > 15 > spread > moved[1]
    answer = answered(robust, silos, as_if_a_hundred, liar)
    found = answer.values["age"]["all"]
    assert min(others) <= found["mean"] <= max(others)
    assert found["interval"][0] < 50 < found["interval"][1] < 60
    assert found["far"] == [[NAMES[liar]]]
    assert f"the mean of {NAMES[liar]} is far from the others': ask there" in answer.notes[1]
    assert answer == answered(robust, silos, as_if_a_hundred, liar)


@pytest.mark.parametrize("lies", [False, True])
def test_the_interval_holds_whatever_the_liars_say(lies: bool) -> None:
    """Rows of one distribution in silos of unlike sizes; two liars claim many rows whose mean is that of the
    furthest honest silo, which moves the median most without being seen."""
    question: Any = table_of({**ROBUST, "groups": 5, "liars": 2}).survey.questions[0]
    draw, held, repeats = np.random.default_rng(1), 0, 300
    for _ in range(repeats):
        rows = draw.integers(50, 300, 5).astype(float)
        first, second = draw.normal(0, 0.2 / np.sqrt(rows)), 0.04 * draw.chisquare(rows - 1) / rows
        if lies:
            rows[:2], first[:2] = 1e6, first[2:].max()
        first, second = rows * first, rows * (second + first**2)
        public = {name: np.zeros(shape) for name, shape in {**question.public, **question.kept}.items()}
        for stage in range(3):
            about = (public["mean"].ravel()[0] - 50) / 50 if stage == 2 else 0.0
            away = {
                "first": first - rows * about,
                "second": (stage == 2) * (second - 2 * about * first + rows * about**2),
            }
            sums = away if stage else {"present": rows, "missing": 0 * rows}
            found = question.step(public, {name: each.reshape(5, 1, 1) for name, each in sums.items()}, stage)
            public |= found
        held += abs(float(public["mean"][0, 0]) - 50) <= public["reach"][0, 0]
    assert held >= 0.93 * repeats


def test_who_is_with_whom_follows_from_the_seed_alone() -> None:
    def members(seed: int, names: Sequence[str] = NAMES) -> Any:
        question: Any = table_of({**ROBUST, "seed": seed}, names).survey.questions[0]
        return [frozenset(group) for group in question.members]

    assert members(0) == members(0, NAMES[::-1])
    assert len({frozenset(members(seed)) for seed in range(8)}) > 4


def test_a_cell_needs_enough_groups_with_rows_and_is_hidden_as_ever() -> None:
    silos = rows_of()
    silos[0]["ill"][:] = silos[1]["ill"][:] = 0.0
    answer = answered({**ROBUST, "by": "ill", "groups": 5, "liars": 2}, silos)
    no, yes = (answer.values["age"][each] for each in ("no", "yes"))
    assert (no["groups"], yes["groups"], yes["mean"], yes["interval"]) == (5, 0, None, [None, None])
    assert yes["count"] > 50
    assert "age, yes: fewer than 5 groups have rows enough" in answer.notes[-1]
    for rows in silos[1:]:
        rows["ill"][:] = 0.0
    silos[4]["ill"][5:8] = 1.0
    answer = answered({**ROBUST, "by": "ill", "groups": 5}, silos)
    assert [answer.values["age"][each]["count"] for each in ("no", "yes")] == [None, None]
    assert answer.hidden == 2


def test_sums_that_no_rows_have_are_refused_with_the_groups_name() -> None:
    def beyond(sums: dict[str, Any], round: int) -> None:
        if round == 2:
            sums["0.first"] *= 10**6

    with pytest.raises(AggregationError, match="doum sent something else"):
        answered({**ROBUST, "groups": 5}, rows_of(), beyond, 3)


def test_what_cannot_be_is_refused_before_round_1() -> None:
    for change, said in (
        ({"groups": 4, "liars": 2}, "takes 5 groups at least"),
        ({"groups": 6}, "takes 6 groups of silos, at least 3, and there are 5 silos"),
        ({"pooling": "sum", "liars": 2}, "liars is of pooling"),
    ):
        with pytest.raises((ConfigError, ValueError), match=said):
            assert table_of({**ROBUST, **change}).survey
    with pytest.raises(ConfigError, match="and there are 2 silos"):
        assert table_of(ROBUST, NAMES[:2]).survey
    table = table_of(ROBUST).model_dump(mode="json", exclude_defaults=True) | {"name": "analysis"}
    asked = {key: table[key] for key in ("table", "columns", "questions")}
    with pytest.raises(ConfigError, match="silos without names"):
        analysis_job(asked, 5, masked=False, name="people")
    noisy = AnalysisTable.model_validate({"name": "analysis", **asked, "noise_multiplier": 1.0})
    with pytest.raises(ConfigError, match=r"median_of_means.*\[privacy\]"):
        assert noisy.survey
    tables = [{"file": f"{name}.csv"} for name in NAMES]
    named = {**asked, "silos": {f"client-{number}": name for number, name in enumerate(NAMES)}}
    for masked, change, said in (
        (True, {}, "secure_aggregation = false, so that the coordinator sees each"),
        (False, {"cohort.size": 4, "cohort.minimum": 4}, "cohort.size = 5, as algorithm.silos has"),
        (False, {"algorithm.silos": {name: name for name in NAMES}}, "'alder' is none of the silos"),
    ):
        job = analysis_job(named, 5, masked=masked, name="people", tables=tables)
        with pytest.raises((ConfigError, PrivacyError), match=said):
            simulate(job, overrides=change, progress=False)


def test_no_silo_writes_into_the_places_of_others() -> None:
    silos = {name: name for name in NAMES}
    asked = {"table": "people", "columns": COLUMNS, "questions": [{**ROBUST, "groups": 5}], "silos": silos}
    job = analysis_job(asked, 5, masked=False, name="people")
    table = cast("AnalysisTable", job.algorithm)
    sent = initial_model(job, AnalysisTask()).layout.sent
    rounds = PlainRounds(job, sent, cast("Any", None))
    step = SimpleNamespace(round=1, attempt=1)
    offer = cast("Any", SimpleNamespace(encoding="float32", at=SimpleNamespace(step=step)))
    public = {name: np.zeros(shape) for name, shape in table.survey.public_places.shapes.items()}
    rows = DataTable(rows_of()[0], table.survey.columns)
    digits = np.zeros(sent.size, dtype="<f4")
    for stage in (0.0, 1.0):
        public["0.stage"][0], public["0.present"][:], public["0.told"][:] = stage, 9.0, 5.0
        for writer in range(5):
            sums = table.survey.sums(rows, public, None, writer)
            digits[sent.places["sums"]] = table.survey.sum_places.encode(sums).numpy()
            for number, client in enumerate((*NAMES, "fir")):
                check = rounds.content_check(client, offer)
                for start, stop in pairwise((0, 4 * 7 + 2, digits.nbytes)):
                    check(digits.tobytes()[start:stop])
                assert ("has the place of another" in check.flaw(Path())) is (number != writer)
