"""The key under which every instruction, answer and upload is idempotent."""

from __future__ import annotations

from typing import Any, NamedTuple

from typing_extensions import override

from roundtable.core.observability.logs import LineKind, shareable

CHECK = "check"
"""The phase in which a silo makes its own model, and says whether that is the job's; nothing else leaves."""


class StepKey(NamedTuple):
    """(job, round, attempt, phase); what the coordinator named was checked when it was decoded."""

    job: str
    round: int
    attempt: int
    phase: str

    @property
    def slug(self) -> str:
        """A file name of its own for each step."""
        return f"{self.job}.{self.round}.{self.attempt}.{self.phase}"

    @override
    def __str__(self) -> str:
        attempt = f", attempt {self.attempt}" if self.attempt > 1 else ""
        return f"{self.job} round {self.round}{attempt}, {self.phase}"


def about(step: StepKey, kind: LineKind = "agent") -> dict[str, Any]:
    """The `extra` of a log line about a step that the silo may share with operators; round 0 is the job."""
    return {**step._asdict(), **shareable(kind)}
