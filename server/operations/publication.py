"""What a job's driver tells of it: events, records, figures and views pass here, or do not leave.

What is withheld (core/observability/released.py) is still in the coordinator's own log and database. They
belong to whoever runs its machine: where that matters, this party sees the updates themselves.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from roundtable.core.observability.released import (
    FIELDS,
    IN_THE_LOG,
    Tells,
    event_released,
    is_told,
    released,
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

    def event(self, note: m.Note) -> m.Note | None:
        """The event as everybody may see it; None for one that stays in the coordinator's log."""
        place = {"round": note.round, "attempt": note.attempt, "client": note.client}
        found = event_released(note.kind, note.message, place, note.detail, self._privacy)
        if found is None:
            return None
        message, detail = found
        return replace(note, message=message, detail=detail)

    def record(self, record: m.RoundRecord) -> m.RoundRecord:
        """A committed round as everybody may see it; `withheld` names what was left out."""
        charge, kept_back = released("charge", record.charge, self._privacy)
        plain = {name: getattr(record, name) for name in record.__dataclass_fields__}
        kept, gone = released("round", plain, self._privacy)
        empty = {name: type(plain[name])() for name in gone}
        if "failures" in kept and not self._tells_updates:
            kept["failures"] = dict.fromkeys(record.failures, _UNANSWERED)
        if "contributors" in kept and "excluded" in gone:
            # Who was left out could be told from who is missing.
            kept["contributors"] = tuple(sorted({*record.contributors, *record.excluded}))
        withheld = tuple(sorted([*gone, *(f"charge.{name}" for name in kept_back)]))
        return m.RoundRecord(**{**kept, **empty, "charge": charge, "withheld": withheld})

    def plain(self, record: m.RoundRecord) -> dict[str, Any]:
        """The record's JSON-able form, as the database keeps it."""
        return record_to_plain(self.record(record))

    def figures(self, record: m.RoundRecord) -> dict[str, int | float]:
        """A committed round in numbers, for trackers; what is withheld is not there."""
        shown = self.record(record)
        measured = figures(shown)
        table = FIELDS["figures"]
        return {
            name: value
            for name, value in measured.items()
            if name not in table or is_told(self._privacy, table[name])
        }

    def view(self, view: EngineView) -> EngineView:
        """Where the job stands, as everybody may see it."""
        if not self.tells_cohorts:
            waiting = "the updates of a secret cohort" if view.phase == m.TRAIN else view.waiting_for
            if view.phase == m.EVALUATE:
                waiting = "evaluations"
            return replace(view, clients={}, waiting_for=waiting)
        if not self._tells_updates:
            clients = {name: replace(each, note="") for name, each in view.clients.items()}
            return replace(view, clients=clients)
        return view

    def fault(self, where: str, handled: str, what: str) -> str:
        """An unexpected error of the driver in words; at whose event, where that may be told."""
        at = f", at {handled}" if self.tells_cohorts else ""
        said = what if self._tells_updates else IN_THE_LOG
        return f"the coordinator failed at this job{where}{at}: {said}"
