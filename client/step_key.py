"""The key under which every instruction, answer and upload is idempotent."""

from __future__ import annotations

from typing import NamedTuple

from typing_extensions import override


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
