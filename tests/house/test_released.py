"""The table of what leaves knows every message, record, event and figure, and the page shows it as it is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from privacy_table import LEVELS, markdown
from promises import PRIVACY

from roundtable.client.door import outgoing
from roundtable.client.step_key import StepKey
from roundtable.core.observability.released import (
    EVENTS,
    FIELDS,
    Tells,
    event_released,
    is_told,
    released,
    tell,
    withheld,
)
from roundtable.engine.messages import RoundRecord
from roundtable.engine.view import EngineView
from roundtable.proto import agent_pb2, operator_pb2

ROOT = Path(__file__).resolve().parents[2]
MESSAGES = {
    name: module for module in (agent_pb2, operator_pb2) for name in module.DESCRIPTOR.message_types_by_name
}
FROM_OPERATORS = {"PutHeader", "PutPart", "PutReply", "SubmitJobRequest"}
"""What operators say themselves, or hear of their own bytes."""
ENVELOPES = {
    "FromAgent",
    "ToAgent",
    "UploadPart",
    "RenewRequest",
    "ListJobsReply",
    "ListClientsReply",
    "ListQueueReply",
}
"""One of the messages in the table each, or of keys."""


def test_every_message_that_leaves_is_in_the_table_field_by_field() -> None:
    sent = {
        name for name in MESSAGES if not name.endswith("Request") and name not in FROM_OPERATORS | ENVELOPES
    }
    assert sent - FIELDS.keys() == set()
    for name in sent:
        found = {field.name for field in MESSAGES[name].DESCRIPTOR.message_types_by_name[name].fields}
        assert found == FIELDS[name].keys(), name


def test_every_field_of_a_rounds_record_is_in_the_table() -> None:
    assert {field.name for field in fields(RoundRecord)} == FIELDS["round"].keys()
    assert {field.name for field in fields(EngineView)} == FIELDS["view"].keys()


def kinds_of_events() -> Iterator[str]:
    """The kinds that engine and coordinator give to events, as their sources say."""
    for folder in ("engine", "server/jobs"):
        for file in (ROOT / folder).rglob("*.py"):
            for call in (
                node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)
            ):
                name = getattr(call.func, "attr", getattr(call.func, "id", ""))
                place = {"note": 0, "Note": 0, "EventRow": 2}.get(name)
                if place is not None and len(call.args) > place:
                    kind = call.args[place]
                    if isinstance(kind, ast.Constant):
                        yield str(kind.value)


def test_every_event_is_in_the_table() -> None:
    said = set(kinds_of_events())
    assert len(said) > 10
    # The engine names the job's states in one place.
    said |= {f"job_{state}" for state in ("waiting", "paused", "finished", "cancelled", "failed")}
    assert said == EVENTS.keys()


@pytest.mark.parametrize("level", LEVELS)
def test_what_nobody_has_classified_is_not_sent(level: str) -> None:
    privacy = LEVELS[level]
    kept, gone = released("round", {"round": 3, "salary": 7}, privacy)
    assert (kept, gone) == ({"round": 3}, ("salary",))
    assert event_released("payday", "alder is paid", {}, {}, privacy) is None
    shown = event_released("job_paused", "paused by olga", {}, {"salary": 7}, privacy)
    assert shown == ("paused by olga", {})


@pytest.mark.parametrize("level", LEVELS)
def test_an_event_tells_only_what_its_level_may(level: str) -> None:
    privacy = LEVELS[level]
    place = {"round": 2, "attempt": 1, "client": "alder"}
    for kind, known in EVENTS.items():
        shown = event_released(kind, "the whole truth", place, dict.fromkeys(known.detail, 1), privacy)
        if shown is None:
            continue
        message, detail = shown
        assert withheld(privacy).isdisjoint(known.detail[name] for name in detail)
        assert (message == "the whole truth") is is_told(privacy, *known.message)
        assert "alder" not in message or is_told(privacy, Tells.COHORT)


MAKE_TOLD = {
    "core/observability/released.py",
    # The silo's policy withholds more than the table does; what it wrote down it had asked before.
    "client/agent/gatekeeper.py",
    "client/agent/spool.py",
    # Lines of the log, as `[log_sharing]` of the silo's file says for each job.
    "client/sharing/line_sharing.py",
    # Which parts of an event, a record and a view may be told.
    "server/operations/publication.py",
}
SAY_PUBLIC = {
    "client/agent/spool.py",
    "client/agent/step_reports.py",
    "server/jobs/admission/series.py",
    "server/jobs/job_registry.py",
}
"""An update without figures; the bytes of an artifact that have gone, and that work begins; that a job was
submitted, or is paused at the coordinator's own fault."""


def calls_of(name: str) -> set[str]:
    """The files of the package that call a function or class by this name."""
    return {
        str(file.relative_to(ROOT))
        for folder in ("core", "privacy", "engine", "client", "cluster", "server", "simulation", "api")
        for file in (ROOT / folder).rglob("*.py")
        if name in file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == name
    }


def test_only_the_doors_say_that_a_value_may_leave() -> None:
    assert calls_of("Told") == MAKE_TOLD
    assert calls_of("public") == SAY_PUBLIC


def test_an_agent_encodes_what_its_data_made_from_told_values_alone() -> None:
    """Fields that the table calls anything but public come out of a `Told`, to which mypy holds callers."""
    place = ROOT / "client" / "door" / "outgoing.py"
    found = set()
    for function in ast.parse(place.read_text(encoding="utf-8")).body:
        if not isinstance(function, ast.FunctionDef):
            continue
        typed = {arg.arg for arg in function.args.args if "Told[" in ast.unparse(arg.annotation or arg)}
        opened = {
            ast.unparse(node.targets[0])
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and ast.unparse(node.value) in {f"{name}.value" for name in typed}
        }
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            name = ast.unparse(call.func).removeprefix("agent_pb2.")
            for field, value in ((each.arg or "", each.value) for each in call.keywords):
                if FIELDS.get(name, {}).get(field, Tells.PUBLIC) is Tells.PUBLIC:
                    continue
                names = {part.id for part in ast.walk(value) if isinstance(part, ast.Name)}
                assert names & (typed | opened), f"{name}.{field} leaves by {function.name} unasked"
                found.add((name, field))
    silent = {"Exchange", "Train", "Evaluate", "Hop", "RegionModel"}
    wanted = {
        (name, field)
        for name, table in FIELDS.items()
        if name in agent_pb2.DESCRIPTOR.message_types_by_name and name not in silent
        for field, kind in table.items()
        if kind is not Tells.PUBLIC
    }
    assert found == wanted


@pytest.mark.parametrize("level", LEVELS)
def test_an_encoder_refuses_what_nobody_asked_for(level: str) -> None:
    step, seen = StepKey("job", 1, 1, "train"), outgoing.ProgressFigures(7, 9, 0.5)
    with pytest.raises(AttributeError):
        outgoing.progress(step, "training", seen)  # type: ignore[arg-type]
    told = tell(LEVELS[level], Tells.SILO, seen, outgoing.ProgressFigures())
    sent = outgoing.progress(step, "training", told).progress
    assert (sent.done == 7) is is_told(LEVELS[level], Tells.SILO)


def test_the_page_shows_the_tables() -> None:
    page = PRIVACY.path.read_text(encoding="utf-8")
    assert all(table in page for table in markdown()), "run: python tools/privacy_table.py"
