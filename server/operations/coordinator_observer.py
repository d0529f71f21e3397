"""What the coordinator counts, times and traces: told by jobs, read by server/metrics_page.py."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roundtable.core.observability.histograms import ProcessMetrics
from roundtable.core.observability.released import Told
from roundtable.core.observability.tracing import Span, Tracer
from roundtable.engine import messages as m
from roundtable.server.operations.incidents import Incident

_REFUSALS = ("invalid_update", "data_corruption", "protocol_violation")


@dataclass
class _Place:
    """Where a job stands and since when; `round_began` is the attempt's beginning."""

    step: m.Step
    since: float
    round_began: float


class CoordinatorObserver:
    """Counts and times for the life of a coordinator. Never blocks: all of it is arithmetic in memory."""

    def __init__(self, tracer: Tracer | None = None, clock: Callable[[], float] = time.time) -> None:
        self.tally = ProcessMetrics()
        self._tracer = tracer or Tracer("coordinator")
        self._clock = clock
        self._places: dict[str, _Place] = {}

    def noted(self, told: Told[m.Note], incident: Incident | None) -> None:
        """Counts an event of a job's history."""
        tally, note = self.tally, told.value
        tally.count("events", note.kind)
        if incident is not None:
            tally.count("incidents", incident.kind, incident.severity)
        if note.kind == "client_failed" and (kind := str(note.detail.get("kind", ""))) in _REFUSALS:
            tally.count("refused", kind)
        elif note.kind == "update_excluded":
            tally.count("refused", str(note.detail.get("reason", "excluded")))
        elif note.kind == "attempt_failed":
            tally.count("rounds", "failed")

    def answered(self, result: str) -> None:
        """Counts the answer to an upload: accepted, rejected, stale, duplicate."""
        self.tally.count("updates", result)
        if result in ("stale", "duplicate"):
            self.tally.count("refused", result)

    def moved(
        self, job: str, step: m.Step | None, records: Sequence[Told[dict[str, Any]]], stored: float
    ) -> None:
        """Times a job's durable transition: rounds in `records` are committed, and the job is at `step` now.

        `stored` is how long the transaction took, in seconds.
        """
        now = self._clock()
        for record in records:
            self._committed(job, record.value, now, stored)
        place = self._places.get(job)
        if place is not None and (step is None or step != place.step):
            self._left(job, place, step, now, bool(records))
        if step is None:
            self._places.pop(job, None)
        elif place is None or place.step != step:
            again = place is not None and (place.step.round, place.step.attempt) == (step.round, step.attempt)
            self._places[job] = _Place(step, now, place.round_began if again and place else now)

    def close(self) -> None:
        """Passes on the spans that wait."""
        self._tracer.close()

    def _committed(self, job: str, record: dict[str, Any], now: float, stored: float) -> None:
        self.tally.count("rounds", "failed" if record.get("closed") else "committed")
        self.tally.took("round", "", record["ended"] - record["started"])
        self.tally.took("phase", m.COMMIT, stored)
        for transfer in record["transfers"].values():
            self._travelled(transfer)
        round, attempt = record["round"], record["attempt"]
        commit = Span(job, round, attempt, (m.COMMIT,), now - stored, now, values={"model": record["model"]})
        self._tracer.tell(commit)
        sizes = (name for name in ("cohort", "contributors") if name not in record["withheld"])
        values = {name: len(record[name]) for name in sizes}
        self._tracer.tell(Span(job, round, attempt, (), record["started"], now, values=values))

    def _travelled(self, transfer: Mapping[str, Any]) -> None:
        """Counts what an update's way took, as far as the job tells it."""
        for what, name in (("update", "up"), ("model", "down")):
            if name in transfer:
                self.tally.add(f"{what}_bytes", transfer[name], "sent")
                self.tally.add(f"{what}_bytes", transfer[f"{name}_plain"], "plain")
        for name in ("encoding_seconds", "decoding_seconds"):
            if name in transfer:
                self.tally.took(name, "", transfer[name])
        if "error" in transfer:
            self.tally.took("encoding_error", "", transfer["error"])

    def _left(self, job: str, place: _Place, step: m.Step | None, now: float, committed: bool) -> None:
        """Times a phase that is over; without a commit the attempt may be over with it."""
        old = place.step
        self.tally.took("phase", old.phase, now - place.since)
        self._tracer.tell(Span(job, old.round, old.attempt, (old.phase,), place.since, now))
        over = step is None or (step.round, step.attempt) != (old.round, old.attempt)
        if over and not committed:
            given_up = "the attempt was given up"
            self._tracer.tell(Span(job, old.round, old.attempt, (), place.round_began, now, given_up))
