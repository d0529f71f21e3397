"""The job file: every mistake names its place, its key, what was expected and the nearest valid name."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from roundtable.core import JobConfig, LayoutRules, job_from_json, load_job, parse_job
from roundtable.core.errors import ConfigError
from roundtable.core.job_tables.task_table import JobTaskTable
from roundtable.core.toml_tables import Table

FULL = """\
task = "digits"
name = "first"
rounds = 20
seed = 7

[model]
local = ["head.*"]

[cohort]
size = 3
minimum = 2
over_selection = 1.3
deadline = "2m"

[algorithm]
name = "fedprox"
mu = 0.1

[aggregation]
rule = "trimmed_mean"
parameters = { trim = 0.1 }
pre = [{ name = "clip", norm = 1.0 }, { name = "mix" }]

[aggregation.server_optimizer]
name = "fedadam"
learning_rate = 0.1

[stop]
metric = "accuracy"
target = 0.97
"""


def mistake_in(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_job(text, "job.toml")
    return str(caught.value)


def tables_of(model: type[BaseModel]) -> list[type[BaseModel]]:
    inner = [
        one
        for field in model.model_fields.values()
        for one in get_args(field.annotation) or [field.annotation]
    ]
    found = [table for table in inner if isinstance(table, type) and issubclass(table, BaseModel)]
    return [model, *(deeper for table in found for deeper in tables_of(table))]


def test_a_full_file() -> None:
    job = parse_job(FULL)
    assert (job.title, job.rounds, job.cohort.deadline) == ("first", 20, 120.0)
    assert job.model.rules() == LayoutRules(local=("head.*",))
    assert job.aggregation.pre == ({"name": "clip", "norm": 1.0}, {"name": "mix"})
    assert job.aggregation.server_optimizer.name == "fedadam"
    assert job.evaluation == JobConfig(task="x").evaluation


@pytest.mark.parametrize(
    ("task", "title"), [("digits", "digits"), ("digits.py", "digits"), ("tasks/digits.py", "tasks.digits")]
)
def test_a_job_without_a_name_is_called_after_its_task(task: str, title: str) -> None:
    assert parse_job(f"task = '{task}'").title == title


def test_every_value_in_force_is_visible() -> None:
    shown = json.loads(parse_job('task = "digits"').to_json())

    def same_keys(table: type[BaseModel], values: dict[str, Any]) -> None:
        assert values.keys() == table.model_fields.keys()
        for key, field in table.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                same_keys(field.annotation, values[key])

    same_keys(JobConfig, shown)


@pytest.mark.parametrize("table", tables_of(JobConfig), ids=lambda table: table.__name__)
def test_every_key_is_explained_and_every_default_is_valid(table: type[BaseModel]) -> None:
    assert table.model_config["extra"] == ("allow" if table is JobTaskTable else "forbid")
    for key, field in table.model_fields.items():
        nested = isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        nested = nested or field.discriminator is not None
        assert nested or field.description, f"{table.__name__}.{key} has no description"
    if all(
        field.default is not PydanticUndefined or field.default_factory
        for field in table.model_fields.values()
    ):
        again = table.model_validate_json(table().model_dump_json(), strict=False)
        assert again == table()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("task = 'd'\nroudns = 3", "job.toml:2: roudns: unknown key; did you mean 'rounds'?"),
        ("task = 'd'\n[cohort]\nsise = 3", "job.toml:3: cohort.sise: unknown key; did you mean 'size'?"),
        ("task = 'd'\ncohort.sise = 3", "job.toml:2: cohort.sise: unknown key; did you mean 'size'?"),
        ("task = 'd'\n\ncohort = { sise = 3 }", "job.toml:3: cohort.sise: unknown key; did you mean 'size'?"),
        ("task = 'd'\n[cohrt]\nsize = 3", "job.toml:2: cohrt: unknown key; did you mean 'cohort'?"),
        (
            "task = 'd'\n[aggregation.server_optimiser]\nname = 'fedadam'",
            "job.toml:2: aggregation.server_optimiser: unknown key; did you mean 'server_optimizer'?",
        ),
        (
            "task = 'd'\n[aggregation]\n[aggregation.server_optimizer]\nbeta = 1",
            "job.toml:4: aggregation.server_optimizer.beta: unknown key; did you mean 'beta",
        ),
        (
            "task = 'd'\n[stop]\nxyz = 1",
            "job.toml:3: stop.xyz: unknown key; known here: metric, target, patience",
        ),
        ("task = 'd'\n'a(b[' = 1", "job.toml: a(b[: unknown key"),
        ("rounds = 3", "job.toml: task: missing; it has no default"),
        ("task = 'd'\nrounds = '3'", "job.toml:2: rounds: Input should be a valid integer (got '3')"),
        ("task = 'd'\nrounds = true", "job.toml:2: rounds: Input should be a valid integer (got True)"),
        ("task = 'd'\nrounds = 2.5", "job.toml:2: rounds: Input should be a valid integer (got 2.5)"),
        (
            "task = 'd'\nrounds = -1",
            "job.toml:2: rounds: Input should be greater than or equal to 1 (got -1)",
        ),
        ("task = 3", "job.toml:1: task: 3 is not a task: write its name in quotes"),
        (
            "task = 'd'\n[evaluation]\nbounds = { recall = 0.0 }",
            "job.toml:3: evaluation.bounds.recall: Input should be",
        ),
        (
            "task = 'd'\n[evaluation]\nbounds = { recall = inf }",
            "evaluation.bounds.recall: Input should be a finite",
        ),
        ("task = 'd'\n[evaluation]\nbounds = { 'a b' = 1.0 }", "String should match pattern"),
        ("task = 'd'\n[evaluation]\nevery = 0\nbounds = { recall = 1.0 }", "and every = 0 measures none"),
        (
            "task = 'd'\n[evaluation]\nclients = 'all'\nbounds = { recall = 1.0 }",
            "masked vectors of those that train",
        ),
        ("task = 'd'\n[evaluation]\ndeadline = 5\nbounds = { recall = 1.0 }", "cohort.deadline is for both"),
        (
            "task = 'd'\nseed = 9223372036854775808",
            "job.toml:2: seed: Input should be less than 9223372036854775808",
        ),
        ("task = 'd'\nname = 'a b'", "job.toml:2: name: String should match pattern"),
        ("task = 'd'\ncohort = 3", "job.toml:2: cohort: should be a table"),
        ("task = 'd'\n[aggregation]\npre = 3", "job.toml:3: aggregation.pre: should be a list"),
        (
            "task = 'd'\n[algorithm]\nname = 'fedporx'",
            "job.toml:3: algorithm.name: unknown algorithm 'fedporx'; known are ",
        ),
        (
            "task = 'd'\n[cohort]\ndeadline = 'soon'",
            'job.toml:3: cohort.deadline: \'soon\' is not a duration; write 30, "30s", "10m", "2h" or "1d"',
        ),
        ("task = 'd'\n[cohort]\ndeadline = inf", "job.toml:3: cohort.deadline: inf is not a duration"),
        ("task = 'd'\n[cohort]\ndeadline = 0", "job.toml:3: cohort.deadline: Input should be greater than 0"),
        (
            "task = 'd'\n[algorithm]\nlearning_rate = nan",
            "job.toml:3: algorithm.learning_rate: Input should be",
        ),
        (
            "task = 'd'\n[simulation]\ndevices = { speed = inf }",
            "job.toml:3: simulation.devices: speed: inf is not a number that can be used here",
        ),
        ("task = 'd'\n[simulation]\ndata = { day = 2020-01-01 }", "write it as text in quotes"),
        ("task = 'd'\nrounds = 3\nrounds = 4", "job.toml:3: not valid TOML: Cannot overwrite a value"),
        ("task = 'd'\nrounds = ", "job.toml:2: not valid TOML: Invalid value"),
        ("rounds = " + "1" * 5000, "job.toml:1: not valid TOML"),
        ("a = " + "[" * 100_000, "not valid TOML"),
    ],
)
def test_each_mistake_says_where_and_what(text: str, message: str) -> None:
    assert message in mistake_in(text)


def test_all_mistakes_are_told_at_once() -> None:
    lines = mistake_in("task = 'd'\nroudns = 3\n[cohort]\nsize = 0\n[stop]\ntarget = 1.0").splitlines()
    assert [line.split(": ")[0] for line in lines] == ["job.toml:4", "job.toml:5", "job.toml:2"]


def test_of_many_mistakes_some_are_told_and_all_are_counted() -> None:
    lines = mistake_in("task = 'd'\n" + "\n".join(f"{'k' * 3000}{n} = 1" for n in range(500))).splitlines()
    assert (len(lines), lines[-1]) == (21, "job.toml: and 480 more mistakes")
    assert max(map(len, lines)) <= 1000


def test_long_values_are_not_repeated_whole() -> None:
    assert len(mistake_in(f"task = 'd'\nrounds = '{'x' * 5000}'")) < 200


@pytest.mark.parametrize(
    ("cohort", "message"),
    [
        ("strategy = 'poisson'", "probability belongs to strategy"),
        ("probability = 0.5", "probability belongs to strategy"),
        ("strategy = 'poisson'\nprobability = 0.5\nsize = 3", "leave out size and over_selection"),
        ("strategy = 'poisson'\nprobability = 0.5\nover_selection = 2", "leave out size and over_selection"),
        ("strategy = 'diversity'", "label belongs to strategy"),
        ("label = 'region'", "label belongs to strategy"),
        ("size = 3\nminimum = 4", "minimum = 4 is above size = 3: no round could ever succeed"),
    ],
)
def test_cohorts_that_contradict_themselves(cohort: str, message: str) -> None:
    text = mistake_in(f"task = 'd'\n[cohort]\n{cohort}")
    assert text.startswith("job.toml:2: cohort: ")
    assert message in text


@pytest.mark.parametrize(
    "cohort",
    [
        "strategy = 'poisson'\nprobability = 0.5\nminimum = 0",
        "strategy = 'diversity'\nlabel = 'region'",
        "strategy = 'reliability'",
        "strategy = 'data_size'\nsize = 3\nminimum = 3",
        "strategy = 'round_robin'\nsize = 1",
    ],
)
def test_cohorts_that_make_sense(cohort: str) -> None:
    assert parse_job(f"task = 'd'\n[cohort]\n{cohort}").cohort.deadline == 600.0


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("[algorithm]\nname = 'fedprox'", "job.toml:2: algorithm.mu: missing; algorithm 'fedprox' needs it"),
        ("[algorithm]\nepochs = 1\nsteps = 5", "epochs = 1 and steps = 5: a round is measured by one"),
        (
            "[algorithm]\nname = 'fedadam'",
            'set [aggregation.server_optimizer] name = "fedadam"',
        ),
        ("[algorithm]\noptimizer = 'adam'", "unknown key; silos train by SGD"),
        (
            "[algorithm]\nmu = 0.1",
            "job.toml:3: algorithm.mu: belongs to name = 'fedprox' or 'fednova' or 'moon', and this table",
        ),
        ("[algorithm]\nname = 'fedprox'\nmuu = 0.1", "algorithm.muu: unknown key; did you mean 'mu'?"),
        (
            "[algorithm]\nname = 'fedprox'\nmu = 0.0",
            "job.toml:4: algorithm.mu: Input should be greater than 0",
        ),
        ("[stop]\ntarget = 0.9", "target and patience need a metric"),
        ("[stop]\npatience = 3", "target and patience need a metric"),
    ],
)
def test_tables_that_contradict_themselves(table: str, message: str) -> None:
    assert message in mistake_in(f"task = 'd'\n{table}")


@pytest.mark.parametrize("text", ['task = "digits"', FULL])
def test_json_round_trip(text: str) -> None:
    job = parse_job(text)
    again = job_from_json(job.to_json())
    assert again == job
    assert again.digest == job.digest
    assert json.loads(job.to_json(), parse_constant=pytest.fail) == json.loads(again.to_json())


@pytest.mark.parametrize("text", ["", "[]", "null", "3", '{"task": 3}', "{" * 100_000, "\ud800"])
def test_json_of_somebody_else(text: str) -> None:
    with pytest.raises(ConfigError, match="job: "):
        job_from_json(text)


def test_the_digest_tells_jobs_apart() -> None:
    digests = {
        parse_job(f"task = 'd'\n{line}").digest for line in ("", "seed = 1", "[algorithm]\nepochs = 2")
    }
    assert len(digests) == 3
    assert parse_job("task = 'd'\nrounds = 10").digest == parse_job("task = 'd'").digest


def test_overrides_win(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(FULL)
    job = load_job(path, {"rounds": 2, "cohort.size": 5, "evaluation.every": 3})
    assert (job.rounds, job.cohort.size, job.evaluation.every) == (2, 5, 3)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("cohort.sise", 5, "--set cohort.sise: cohort.sise: unknown key; did you mean 'size'?"),
        ("cohort.size", 0, "--set cohort.size: cohort.size: Input should be greater"),
        ("rounds.x", 5, "--set rounds.x: 'rounds' is a value, not a table"),
        ("", 5, "unknown key"),
    ],
)
def test_mistakes_in_overrides_name_the_option(tmp_path: Path, key: str, value: Any, message: str) -> None:
    path = tmp_path / "job.toml"
    path.write_text(FULL)
    with pytest.raises(ConfigError) as caught:
        load_job(path, {key: value})
    assert message in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml: cannot be read: No such file"):
        load_job(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_job(tmp_path)
    (tmp_path / "latin.toml").write_bytes("task = 'größe'".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"latin\.toml: cannot be read: it is not UTF-8 text"):
        load_job(tmp_path / "latin.toml")


@given(st.text(max_size=40) | st.text("[]=.'\"abc\n {}#1", max_size=40))
def test_any_text_is_a_job_or_a_config_error(text: str) -> None:
    for whole in (text, "task = 'd'\n" + text):
        try:
            job = parse_job(whole)
        except ConfigError:
            continue
        assert tomllib.loads(whole)["task"] in (job.task.name, job.task.model_dump())


def test_a_task_has_a_name_or_a_table(tmp_path: Path) -> None:
    plain = parse_job('task = "t.py:T"')
    assert parse_job('[task]\nname = "t.py:T"') == plain
    table = parse_job('[task]\nname = "t.py:T"\nhidden = [8, 4]\nmode = "wide"')
    assert table.task.parameters == {"hidden": [8, 4], "mode": "wide"}
    assert job_from_json(table.to_json()) == table
    assert table.digest != plain.digest
    (tmp_path / "job.toml").write_text('task = "t.py:T"\n')
    changed = load_job(tmp_path / "job.toml", {"task.hidden": [8, 4], "task.mode": "wide"})
    assert changed.digest == table.digest
    assert load_job(tmp_path / "job.toml", {"task": "u.py"}).task.name == "u.py"
    for text, message in (
        ('[task]\nname = "t"\nday = 2026-01-01', "task: .*day: 2026-01-01 is a date"),
        ('[task]\nname = "t"\nrate = nan', "task: .*rate: nan is not a number"),
        ('[task]\nname = "t"\n"hidden size" = 3', "task: .*'hidden size' cannot be the name of a parameter"),
        ("[task]\nhidden = 3", r"task\.name: missing"),
        ('[task]\nname = ""', r"task\.name"),
        ("task = 3", "task: "),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_job(text)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["task", "cohort", "size", "model", "a(b"]), inner, max_size=4)
        ),
        max_leaves=8,
    )
)
def test_any_json_is_a_job_or_a_config_error(values: Any) -> None:
    try:
        job = job_from_json(json.dumps(values))
    except ConfigError:
        return
    assert job_from_json(job.to_json()) == job


class Inner(Table):
    size: int = 3


class Outer(Table):
    maybe: Inner | None = None
    many: dict[str, Inner] | None = None


@pytest.mark.parametrize("text", ["[maybe]\nsise = 1", "[many.first]\nsise = 1"])
def test_hints_reach_into_optional_and_repeated_tables(text: str) -> None:
    from roundtable.core.toml import TomlDocument, validate

    with pytest.raises(ConfigError, match=r"f\.toml:2: .*sise: unknown key; did you mean 'size'\?"):
        validate(Outer, TomlDocument.parse(text, "f.toml"))
