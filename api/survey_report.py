"""The signed report of a survey: what was asked and answered, by whoever asked, checked by the root."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, JsonValue

from roundtable.core.analyses.question import Answer
from roundtable.core.errors import IdentityError, RoundtableError
from roundtable.core.identity.credentials import SiloIdentity, identity_of
from roundtable.core.identity.signing import SUBMITTERS, Signed, envelope, job_digest, open_envelope
from roundtable.core.paths import AnyPath, written_whole
from roundtable.core.toml import TomlDocument, validate
from roundtable.core.toml_tables import Finite, Table, as_tuple
from roundtable.surveys import SurveyAnswers, plain

MOST_BYTES = 64 << 20
_Texts = Annotated[tuple[str, ...], BeforeValidator(as_tuple)]
_Rows = Annotated[tuple[tuple[JsonValue, ...], ...], BeforeValidator(lambda rows: tuple(map(tuple, rows)))]


class _AnswerTable(Table):
    title: str
    ask: str
    header: _Texts
    rows: _Rows
    values: dict[str, JsonValue]
    why: str
    hidden: int = Field(ge=0)
    notes: _Texts


class _PrivacyTable(Table):
    level: str
    relation: str
    epsilon: Finite
    delta: Finite
    noise_multiplier: Finite
    guarantee: bool


class ReportTable(Table):
    """The statement of a report."""

    time: float
    job: str
    asked: str = Field(description="BLAKE3 of the job's configuration")
    name: str
    silos: int = Field(ge=1)
    rounds: int = Field(ge=0)
    masked: bool
    least_count: int = Field(ge=0)
    privacy: _PrivacyTable | None = None
    answers: Annotated[tuple[_AnswerTable, ...], BeforeValidator(as_tuple)]

    @property
    def findings(self) -> SurveyAnswers:
        """The answers again."""
        answers = [Answer(**{name: getattr(each, name) for name in _KEPT}) for each in self.answers]
        privacy = None if self.privacy is None else self.privacy.model_dump()
        head = (self.silos, self.rounds, self.masked, self.least_count, privacy)
        return SurveyAnswers(self.name, answers, *head)


_KEPT = tuple(_AnswerTable.model_fields)


def write_report(
    path: AnyPath, findings: SurveyAnswers, identity: SiloIdentity, job: str, config: str
) -> None:
    """Signs what a job has answered, `config` being the job's configuration as the coordinator keeps it."""
    answers = [{name: getattr(answer, name) for name in _KEPT} for answer in findings.answers]
    values: dict[str, Any] = {
        "time": time.time(),
        "job": job,
        "asked": job_digest(config),
        **{field.name: getattr(findings, field.name) for field in dataclasses.fields(SurveyAnswers)},
        "answers": plain(answers),
    }
    with written_whole(path) as file:
        file.write(json.dumps(envelope(identity, "report", values), indent=1) + "\n")


def read_report(path: AnyPath, ca: bytes) -> tuple[Signed, ReportTable]:
    """Who signed a report, and what it says. IdentityError where the root does not vouch for the signer, or
    where anything of it was changed."""
    file = Path(path)
    try:
        if file.stat().st_size > MOST_BYTES:
            raise IdentityError(f"{file} is larger than {MOST_BYTES >> 20} MiB, and no report")
        document = json.loads(file.read_text(encoding="utf-8"))
        role = identity_of(str(document["certificate"]).encode())[1]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise IdentityError(f"{file} is no signed report: {error}") from error
    if role not in SUBMITTERS:
        raise IdentityError(f"{file} is signed by the role {role}, which asks for no analyses")
    signed = open_envelope(document, ca, role, "report")
    try:
        return signed, validate(ReportTable, TomlDocument(dict(signed.values), str(file), ""))
    except RoundtableError as error:
        raise IdentityError(f"{file} is signed, and no report: {error}") from error
