"""Surveys: a file of questions, answered over local files or by a coordinator's silos."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field, PrivateAttr

from roundtable.client.analysis_task import OwnAnalysis
from roundtable.core import extras
from roundtable.core.algorithms.analysis import LEAST_COUNT, AnalysisTable, answers_of
from roundtable.core.analyses.own_question import OwnTable
from roundtable.core.analyses.question import Answer
from roundtable.core.analyses.questions_table import AnyQuestion
from roundtable.core.config import JobConfig, job_document
from roundtable.core.errors import AggregationError, ConfigError, RoundtableError, TaskError
from roundtable.core.foreign_text import spreadsheet_cell
from roundtable.core.job_tables.task_table import JobTaskTable
from roundtable.core.paths import AnyPath, written_whole
from roundtable.core.plugins.doors import described
from roundtable.core.tables.table_description import Columns, DataTableTable, Header
from roundtable.core.task import load_task
from roundtable.core.toml import validate, with_place
from roundtable.core.toml_tables import Name, Open, Table, as_tuple
from roundtable.engine.analysis_job import analysis_job
from roundtable.privacy.secagg import MINIMUM_COHORT
from roundtable.survey_privacy import SurveyPlan, SurveyPrivacyTable, cost_of, privacy_of

if TYPE_CHECKING:
    from roundtable.simulation import Progress


class SurveyFile(Table):
    """A survey: the columns as the study means them, and what is asked of them."""

    name: Name | None = Field(None, description="name of the job; default: the table's")
    table: Name = Field(description="the silos' table, [data.NAME] in their agent.toml")
    columns: Columns = Field(description="what the study says of the columns, as [columns.age]")
    questions: Annotated[
        tuple[AnyQuestion, ...], BeforeValidator(as_tuple), Field(min_length=1, max_length=200)
    ] = Field(description="what is asked, each a table [[questions]] with ask")
    least_count: int = Field(
        LEAST_COUNT, ge=1, le=10**6, description="fewest rows of a cell or group that is told of"
    )
    round_to: int = Field(
        1, ge=1, le=10**6, description="tell counts as multiples of this; of histogram, table and top_values"
    )
    secure_aggregation: bool | None = Field(
        None,
        description="mask sums, so that nobody sees those of a single silo; takes three silos. Default: "
        "true; with [privacy] false",
    )
    privacy: SurveyPrivacyTable | None = Field(
        None, description="differential privacy: each silo adds noise that hides each of its rows"
    )
    silos: dict[Name, str | DataTableTable] = Field(
        default_factory=dict,
        description="to answer on this machine: each silo's file, or a table as [data.NAME] has it",
    )
    header: Header = Field(
        (), description="of the files of [silos]: names of columns, where they lack a line of them"
    )
    cohort: int | None = Field(
        None, ge=1, description="with a coordinator: how many silos take part; default: all that it has"
    )
    code: str | None = Field(
        None, min_length=1, description='what asks the question "own": file.py:Class, or an installed task'
    )
    parameters: Open = Field(default_factory=dict, description="of the code's class, by name")
    _folder: Path = PrivateAttr(default_factory=Path.cwd)

    @property
    def folder(self) -> Path:
        """Where its code lies."""
        return self._folder

    @property
    def task(self) -> JobTaskTable:
        """The task of its job."""
        return JobTaskTable.model_validate({**self.parameters, "name": self.code or "analysis"})

    @property
    def masked(self) -> bool:
        """Whether its sums are masked."""
        return self.privacy is None if self.secure_aggregation is None else self.secure_aggregation

    @property
    def goes_by_silos(self) -> bool:
        """Whether a question has to know which silos take part."""
        return any(question.goes_by_silos for question in self.questions)

    def asked(self) -> dict[str, Any]:
        """What is asked: the keys of the job's [algorithm]."""
        given = {"table", "columns", "questions", "least_count", "round_to"}
        asked = self.model_dump(mode="json", include=given)
        return asked if self.privacy is None else {**asked, "noise_multiplier": self.privacy.noise_multiplier}


@dataclass(frozen=True)
class SurveyAnswers:
    """What a survey has found: an answer for each question, over `silos` silos, after so many rounds.

    `privacy` is what it cost the silos' rows, as `SurveyPlan` has it, and whether that is guaranteed: the
    noise of a simulation can be repeated. None where the answers are exact.
    """

    name: str
    answers: Sequence[Answer]
    silos: int
    rounds: int
    masked: bool
    least_count: int
    privacy: Mapping[str, Any] | None = None

    def __getitem__(self, question: int | str) -> Mapping[str, Any]:
        """An answer's values, by the question's number from 0, or its title. KeyError for an unknown one."""
        if isinstance(question, int):
            return self.answers[question].values
        for answer in self.answers:
            if answer.title == question:
                return answer.values
        raise KeyError(question)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values, in full precision; None for what is hidden or not defined."""
        answers = [
            {
                "title": answer.title,
                "ask": answer.ask,
                "answered": not answer.why,
                "why": answer.why,
                "hidden_cells": answer.hidden,
                "notes": list(answer.notes),
                "values": plain(answer.values),
            }
            for answer in self.answers
        ]
        return {
            "name": self.name,
            "silos": self.silos,
            "rounds": self.rounds,
            "secure_aggregation": self.masked,
            "least_count": self.least_count,
            "privacy": None if self.privacy is None else dict(self.privacy),
            "answers": answers,
        }

    def to_csv(self, path: AnyPath) -> None:
        """Every answer's table, one below the other: title, then its header, then its rows. Words that a
        spreadsheet would take for a formula stand behind an apostrophe."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        for number, answer in enumerate(self.answers):
            writer.writerows([[]] if number else [])
            table = [answer.header, *answer.rows] if not answer.why else [["not answered", answer.why]]
            writer.writerows([spreadsheet_cell(value) for value in line] for line in ([answer.title], *table))
        with written_whole(path) as file:
            file.write(text.getvalue())

    def frame(self, question: int) -> Any:
        """An answer's table as a pandas data frame, which takes the extra pandas."""
        answer = self.answers[question]
        return extras.load("pandas", "a data frame").DataFrame(list(answer.rows), columns=list(answer.header))

    def save_model(self, path: AnyPath, question: int | str | None = None) -> None:
        """Writes the trees of an answer as xgboost's JSON, which `xgboost.Booster` loads; by number from 0 or
        title, needed where several have trees. ConfigError where there is none, or it is not clear which.
        """
        found = [
            answer
            for number, answer in enumerate(self.answers)
            if answer.model is not None and question in (None, number, answer.title)
        ]
        if len(found) != 1:
            titles = ", ".join(repr(answer.title) for answer in found)
            which = f"{titles} have one each: say which" if found else "answers of boosted_trees have"
            raise ConfigError(f"no single answer of this survey has a model to write; {which}")
        with written_whole(path) as file:
            file.write(json.dumps(found[0].model, allow_nan=False))

    def plot(self, path: AnyPath) -> None:
        """A picture (PNG, SVG or PDF, by the path's ending) of what has one; takes the extra plot.

        ConfigError where no question has a picture.
        """
        from roundtable.survey_figures import draw

        draw(self.answers, Path(path))


def load_survey(path: AnyPath, overrides: Mapping[str, Any] | None = None) -> SurveyFile:
    """Reads and checks a survey; files of its [silos] count from its folder.

    Raises ConfigError with file, line and key for each mistake.
    """
    document = job_document(path, overrides)
    survey = validate(SurveyFile, document)
    folder = Path(path).resolve().parent
    survey._folder = folder
    made = {name: _local_table(survey, value, folder) for name, value in survey.silos.items()}
    with with_place(document):
        questions = _with_form(survey)
    return survey.model_copy(update={"silos": made, "questions": questions})


def _with_form(survey: SurveyFile) -> tuple[AnyQuestion, ...]:
    """The questions, with what the survey's code asks for in the place of `own`. ConfigError for code that
    nobody asks, or that is none of an analysis."""
    own = [question for question in survey.questions if isinstance(question, OwnTable)]
    if survey.code is None:
        if survey.parameters:
            raise ConfigError("parameters are those of code, and the survey names none", key=("parameters",))
        return survey.questions  # A question "own" says itself that it needs code.
    if len(own) != 1:
        raise ConfigError(
            f'code = {survey.code!r} answers one question, ask = "own", and the survey has {len(own)}',
            key=("code",),
        )
    code = load_task(survey.code, survey.folder, parameters=survey.parameters)
    if not isinstance(code, OwnAnalysis):
        raise ConfigError(f"{survey.code!r} is no rt.OwnAnalysis", key=("code",))
    try:
        form = code.form(survey.columns)
    except RoundtableError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{type(code).__name__}.form() failed: {described(error)}", key=("code",)
        ) from error
    if own[0].form not in (None, form):
        raise ConfigError(f"{survey.code!r} asks for something else than the survey's form", key=("code",))
    return tuple(
        question.model_copy(update={"form": form}) if question is own[0] else question
        for question in survey.questions
    )


def _local_table(survey: SurveyFile, value: str | DataTableTable, folder: Path) -> DataTableTable:
    table = DataTableTable(file=value, header=survey.header) if isinstance(value, str) else value
    if table.file is None:
        return table
    return table.model_copy(update={"file": str(folder / Path(table.file).expanduser())})


def survey_job(survey: SurveyFile, silos: int, names: Sequence[str] = ()) -> JobConfig:
    """The job that answers a survey over so many silos; `names` are those of a coordinator's silos that
    answer analyses. ConfigError for a question that cannot be asked."""
    if survey.masked and silos < MINIMUM_COHORT:
        raise ConfigError(
            f"secure_aggregation takes at least {MINIMUM_COHORT} silos, or a sum hides nobody's; there are "
            f"{silos}: set secure_aggregation = false if each silo's sums may be seen"
        )
    asked = survey.asked()
    if survey.goes_by_silos:
        asked["silos"] = _named(survey, silos, names)
    tables = [
        each.model_dump(mode="json", exclude_none=True)
        for each in survey.silos.values()
        if isinstance(each, DataTableTable)
    ]
    name, noisy = survey.name or survey.table, survey.privacy
    return analysis_job(
        asked,
        silos,
        masked=survey.masked,
        name=name,
        tables=tables,
        task=survey.task,
        privacy=None if noisy is None else noisy.model_dump(exclude={"noise"}),
    )


def _named(survey: SurveyFile, silos: int, names: Sequence[str]) -> dict[str, str]:
    """Each silo's name in answers by the name that it takes part with. ConfigError where some are left out,
    nobody knows which."""
    from roundtable.engine.population import NumberedNames

    if survey.silos:
        return dict(zip(NumberedNames(len(survey.silos)), survey.silos, strict=True))
    if names and len(names) != silos:
        raise ConfigError(
            f"cohort = {silos} leaves out some of {len(names)} silos, nobody knows which, and a question of "
            "the survey goes by silos: leave cohort out",
            key=("cohort",),
        )
    return {name: name for name in names}


def analyse(
    survey: SurveyFile | AnyPath,
    *,
    overrides: Mapping[str, Any] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> SurveyAnswers:
    """Answers a survey over the local files of its `[silos]`, through the engine that runs in production.

    Raises ConfigError for mistakes in the survey, AggregationError with the silo's reason where it cannot be
    answered.
    """
    from roundtable.simulation import simulate

    if not isinstance(survey, SurveyFile):
        survey = load_survey(survey, overrides)
    if not survey.silos:
        raise ConfigError(
            "the survey names no [silos] with their files: name them, or give --coordinator to ask its silos"
        )
    job = survey_job(survey, len(survey.silos))
    try:
        result = simulate(job, progress=progress or False, folder=survey.folder)
    except TaskError as error:
        raise TaskError(_with_names(str(error), survey)) from error
    if result.status != "finished":
        raise AggregationError(_with_names(f"{job.title}: {result.reason}", survey))
    return findings_of(job, result.model.vector, len(result.history), survey.folder, guarantee=False)


def findings_of(
    job: JobConfig, vector: Any, rounds: int, folder: Path | None = None, *, guarantee: bool = True
) -> SurveyAnswers:
    """The findings in an analysis's global vector; `folder` is where code of one's own lies, without which
    its answer is the totals; `guarantee` False where noise can be repeated. TaskError for a job that is no
    analysis."""
    code = None
    if job.task.name != "analysis" and folder is not None:
        code = load_task(job.task.name, folder, parameters=job.task.parameters)
    answers, silos = answers_of(job.algorithm, vector, code)
    masked = getattr(job.privacy, "secure_aggregation", False)
    least, privacy = getattr(job.algorithm, "least_count", 0), privacy_of(job, guarantee)
    return SurveyAnswers(job.title, answers, silos, rounds, masked, least, privacy)


def survey_plan(survey: SurveyFile) -> SurveyPlan:
    """What a survey will cost. ConfigError for one without [privacy], or that cannot be asked."""
    if survey.privacy is None:
        raise ConfigError(
            "the survey has no [privacy]: its answers are exact, and no epsilon bounds what they tell of a "
            "row; add [privacy] with epsilon"
        )
    table = AnalysisTable.model_validate({"name": "analysis", **survey.asked()})
    return cost_of(table.survey, survey.privacy, survey.masked)


def _with_names(text: str, survey: SurveyFile) -> str:
    """The silos' own names in the place of simulated clients'."""
    from roundtable.engine.population import NumberedNames

    for name, silo in zip(NumberedNames(len(survey.silos)), survey.silos, strict=True):
        text = text.replace(name, silo)
    return text


def plain(value: Any) -> Any:
    """Values that JSON has: what is not finite becomes None."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, bool | str | int) or value is None:
        return value
    number = float(value)
    return number if math.isfinite(number) else None


def json_of(findings: SurveyAnswers) -> str:
    """`to_dict` as indented JSON."""
    return json.dumps(findings.to_dict(), indent=2, allow_nan=False)
