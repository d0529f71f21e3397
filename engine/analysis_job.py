"""The job that answers questions: rounds, cohort, masks and checks under which its sums are exact."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from roundtable.core.algorithms.analysis import OPEN, AnalysisTable
from roundtable.core.analyses.exact_sums import MOST_SILOS
from roundtable.core.config import JobConfig
from roundtable.core.job_tables.task_table import JobTaskTable
from roundtable.core.toml import TomlDocument, validate
from roundtable.privacy.secure_round import exact_norm

_SPARE_ROUNDS = 3
"""For rounds that are closed without a model."""


def analysis_job(
    asked: Mapping[str, Any],
    silos: int,
    *,
    masked: bool,
    name: str,
    tables: Sequence[Any] = (),
    task: JobTaskTable | None = None,
    privacy: Mapping[str, Any] | None = None,
) -> JobConfig:
    """The job that asks so many silos what `asked` says, the keys of [algorithm].

    `tables` are descriptions of simulated silos' tables, one each; none for a coordinator's silos. `task`
    where it is not what is built in. `privacy` are level, epsilon and delta of an analysis with noise, whose
    multiplier is in `asked`. Raises ConfigError for a question that the columns do not allow.
    """
    asked = {"name": "analysis", "most_silos": min(silos, MOST_SILOS), **asked}
    table = AnalysisTable.model_validate(asked)
    questions = table.survey
    stop: dict[str, Any] = {"metric": OPEN, "target": 0.0, "larger_is_better": False}
    rounds = questions.rounds + _SPARE_ROUNDS
    protected: dict[str, Any] = {"level": "none"}
    validation: dict[str, Any] = {"policy": "fail", "norm_ratio": "off", "weight_ratio": "off"}
    if privacy is not None:
        # Each round has its noise, and how many there are does not depend on silos' rows.
        stop, rounds = {}, questions.rounds
        protected = {**privacy, "noise_multiplier": table.noise_multiplier, "clip_norm": 1.0}
    if masked:
        protected["secure_aggregation"] = True
        validation = {}
    if masked and privacy is None:
        norm = exact_norm(questions.sum_places.size + 1, table.most_silos)
        protected["clip_norm"] = math.ceil(norm) * 1.0
    local = {"clients": silos, "data": {table.table: [*tables]}, "backend": "sequential"} if tables else {}
    values = {
        "task": "analysis" if task is None else task.model_dump(mode="json"),
        "name": name,
        "rounds": rounds,
        "algorithm": asked,
        "cohort": {"size": silos, "minimum": silos, "retries": 1},
        "aggregation": {"weighting": "uniform", "validation": validation},
        "privacy": protected,
        "evaluation": {"every": 0},
        "stop": stop,
        "simulation": local,
    }
    return validate(JobConfig, TomlDocument(values, "survey", ""))
