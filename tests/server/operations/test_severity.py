"""How severe a silo's failure is: by its kind, how many fail, how often, and what is left of the quorum."""

from __future__ import annotations

import pytest

from roundtable.core.observability.released import public
from roundtable.engine import messages as m
from roundtable.server.operations.incidents import incident_of


@pytest.mark.parametrize(
    ("kind", "plight", "severity"),
    [
        ("slow_node", {}, "warning"),
        ("slow_node", {"failed": 1, "cohort": 10, "spare": 4, "on_end": 2}, "warning"),
        ("slow_node", {"failed": 1, "cohort": 10, "spare": 4, "on_end": 3}, "error"),
        ("slow_node", {"failed": 5, "cohort": 10, "spare": 1, "on_end": 1}, "error"),
        ("slow_node", {"failed": 1, "cohort": 1, "spare": 1, "on_end": 1}, "warning"),
        ("slow_node", {"failed": 1, "cohort": 3, "spare": 0, "on_end": 1}, "error"),
        ("busy", {"failed": 1, "cohort": 3, "spare": 0, "on_end": 0}, "warning"),
        ("busy", {"failed": 1, "cohort": 9, "spare": 4, "on_end": 0}, "info"),
        ("task_error", {"failed": 9, "cohort": 9, "spare": -5, "on_end": 9}, "error"),
    ],
)
def test_severity(kind: str, plight: dict[str, int], severity: str) -> None:
    note = m.Note("client_failed", "it failed", 1, 1, "alder", {"kind": kind, "phase": "train", **plight})
    incident = incident_of(public(note))
    assert incident is not None
    assert incident.severity == severity
