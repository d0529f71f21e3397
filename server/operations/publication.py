"""What a job's driver tells of it: events, records, figures and views pass here, or do not leave.

What is withheld (core/observability/released.py) is still in the coordinator's own log and database. They
belong to whoever runs its machine: where that matters, this party sees the updates themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from roundtable.core.observability.released import (
    FIELDS,
    IN_THE_LOG,
    Tells,
    Told,
    event_released,
    is_told,
    released,
    tell,
)
from roundtable.core.privacy_table import NoPrivacy, Private
from roundtable.engine import EngineView, figures
from roundtable.engine import messages as m
from roundtable.engine.state import record_to_plain

_UNANSWERED = "did not answer: " + IN_THE_LOG


class Publication:
    """The door of one job's figures, by its level of privacy."""

    def __init__(self, privacy: NoPrivacy | Private) -> None:
        self._privacy = privacy

    @property
    def tells_cohorts(self) -> bool:
        """Whether anybody may know who takes part in a round."""
        return is_told(self._privacy, Tells.COHORT)

    @property
    def _tells_updates(self) -> bool:
        return is_told(self._privacy, Tells.UPDATE)

    def event(self, note: m.Note) -> Told[m.Note] | None:
        """The event as everybody may see it; None for one that stays in the coordinator's log."""
        place = {"round": note.round, "attempt": note.attempt, "client": note.client}
        found = event_released(note.kind, note.message, place, note.detail, self._privacy)
        if found is None:
            return None
        message, detail = found
        return Told(replace(note, message=message, detail=detail))

    def record(self, record: m.RoundRecord) -> Told[m.RoundRecord]:
        """A committed round as everybody may see it; `withheld` names what was left out."""
        charge, kept_back = released("charge", record.charge, self._privacy)
        plain = {name: getattr(record, name) for name in record.__dataclass_fields__}
        kept, gone = released("round", plain, self._privacy)
        empty = {name: type(plain[name])() for name in gone}
        if "failures" in kept and not self._tells_updates:
            kept["failures"] = dict.fromkeys(record.failures, _UNANSWERED)
        held_back: set[str] = set()
        if "transfers" in kept:
            told = {
                name: released("transfer", each, self._privacy) for name, each in record.transfers.items()
            }
            kept["transfers"] = {name: values for name, (values, _) in told.items()}
            held_back = {f"transfers.{name}" for _, names in told.values() for name in names}
        if "contributors" in kept and "excluded" in gone:
            # Who was left out could be told from who is missing.
            kept["contributors"] = tuple(sorted({*record.contributors, *record.excluded}))
        withheld = tuple(sorted([*gone, *(f"charge.{name}" for name in kept_back), *held_back]))
        return Told(m.RoundRecord(**{**kept, **empty, "charge": charge, "withheld": withheld}))

    def plain(self, record: m.RoundRecord) -> Told[dict[str, Any]]:
        """The record's JSON-able form, as the database keeps it."""
        return self.record(record).become(record_to_plain)

    def figures(self, record: m.RoundRecord) -> Told[dict[str, int | float]]:
        """A committed round in numbers, for trackers; what is withheld is not there."""
        table = FIELDS["figures"]

        def measured(shown: m.RoundRecord) -> dict[str, int | float]:
            # A mean has a name of its own, and is of what the record shows.
            return {
                name: value
                for name, value in figures(shown).items()
                if name not in table or is_told(self._privacy, table[name])
            }

        return self.record(record).become(measured)

    def steps(self, means: Mapping[str, Mapping[str, float]]) -> Told[dict[str, float]]:
        """What silos' clusters said of a round's steps, by silo and figure, under a name for each."""
        table = FIELDS["ClientActivity"]
        named = {
            f"{client}/step_{name}": value
            for client, values in means.items()
            if is_told(self._privacy, table["client"])
            for name, value in values.items()
        }
        return tell(self._privacy, table["figures"], named, {})

    def view(self, view: EngineView) -> Told[EngineView]:
        """Where the job stands, as everybody may see it."""
        plain = {name: getattr(view, name) for name in view.__dataclass_fields__}
        kept, gone = released("view", plain, self._privacy)
        waiting = "the updates of a secret cohort" if view.phase == m.TRAIN else view.waiting_for
        hidden: dict[str, Any] = {name: type(plain[name])() for name in gone}
        if "waiting_for" in gone:
            asked = {m.CHECK: "the models that silos make", m.EVALUATE: "evaluations"}
            hidden["waiting_for"] = asked.get(view.phase, waiting)
        if "clients" in kept and not self._tells_updates:
            kept["clients"] = {name: replace(each, note="") for name, each in view.clients.items()}
        return Told(EngineView(**kept, **hidden))

    def fault(self, where: str, handled: str, what: str) -> str:
        """An unexpected error of the driver in words; at whose event, where that may be told."""
        at = f", at {handled}" if self.tells_cohorts else ""
        said = what if self._tells_updates else IN_THE_LOG
        return f"the coordinator failed at this job{where}{at}: {said}"
