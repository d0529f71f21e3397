"""The key under which every instruction, answer and upload is idempotent."""

from __future__ import annotations

import re
from typing import NamedTuple

from typing_extensions import override

from roundtable.core.errors import ProtocolError
from roundtable.proto import common_pb2

# Parts of a key become names of files: nothing that could lead out of a folder.
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}")


class StepKey(NamedTuple):
    """(job, round, attempt, phase)."""

    job: str
    round: int
    attempt: int
    phase: str

    @classmethod
    def of(cls, step: common_pb2.Step) -> StepKey:
        """The key in a message; ProtocolError for words that a coordinator never gives out."""
        for word in (step.job, step.phase):
            if not _WORD.fullmatch(word):
                raise ProtocolError(f"the coordinator named a step by {word!r}, which is no valid identifier")
        return cls(step.job, step.round, step.attempt, step.phase)

    def message(self) -> common_pb2.Step:
        """The key as it travels."""
        return common_pb2.Step(job=self.job, round=self.round, attempt=self.attempt, phase=self.phase)

    @property
    def slug(self) -> str:
        """A file name of its own for each step."""
        return f"{self.job}.{self.round}.{self.attempt}.{self.phase}"

    @override
    def __str__(self) -> str:
        attempt = f", attempt {self.attempt}" if self.attempt > 1 else ""
        return f"{self.job} round {self.round}{attempt}, {self.phase}"
