"""The tables `[log_sharing]` and `[diagnostics]` of agent.toml: what operators may know of the agent.

By default nothing, and a person at the silo answers requests.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from roundtable.core.config import JobConfig
from roundtable.core.observability.log_levels import LogLevel
from roundtable.core.observability.logs import LineKind
from roundtable.core.observability.released import Tells, is_told
from roundtable.core.privacy_table import hides_figures
from roundtable.core.toml_tables import Table


class LogSharingTable(Table):
    """`[log_sharing]`: which lines about jobs go to the coordinator, for `roundtable job log`."""

    kinds: list[LineKind] = Field(
        default_factory=list,
        description="agent: what the agent itself does, in fixed words; figures: its lines with losses, "
        "counts and times of training; output: what the task prints, which can be anybody's data; "
        "default: none",
    )
    level: LogLevel = Field("info", description="lines of this level and above")
    tasks: list[str] | None = Field(
        None, description="of jobs with these tasks alone, by their names in [tasks]"
    )
    jobs: list[str] | None = Field(
        None, description="of these jobs alone, by their identifiers or the beginnings of them"
    )
    private_jobs: bool = Field(
        False,
        description="all these kinds also of jobs with a level of privacy or secure aggregation: what "
        "noise and masks hide may then stand in a line",
    )
    most_lines: int = Field(200, ge=1, le=5000, description="most lines of one round of a job")
    most_bytes: int = Field(65_536, ge=1000, le=1 << 20, description="most bytes of them")

    def kinds_for(self, job: str, config: JobConfig, task: str) -> frozenset[LineKind]:
        """The kinds of lines that leave about a job; `task` is its name in `[tasks]`.

        Nothing leaves about a job whose guarantee rests on nobody being told who was drawn; where the
        coordinator adds the noise, whether a step failed is hidden too, and the agent's own lines tell it.
        """
        if not is_told(config.privacy, Tells.COHORT):
            return frozenset()
        if self.tasks is not None and task not in self.tasks:
            return frozenset()
        if self.jobs is not None and not job.startswith(tuple(filter(None, self.jobs))):
            return frozenset()
        if self.private_jobs or not hides_figures(config.privacy):
            return frozenset(self.kinds)
        own: frozenset[LineKind] = frozenset(["agent"] if is_told(config.privacy, Tells.UPDATE) else [])
        return own & frozenset(self.kinds)


class DiagnosticsTable(Table):
    """`[diagnostics]`: reports of this silo that operators ask for, with `roundtable clients diagnose`."""

    reports: Literal["ask", "always", "never"] = Field(
        "ask",
        description="ask: a person looks and approves (`roundtable client requests`); always: sent unseen; "
        "never: denied",
    )
    log_lines: int = Field(200, ge=0, le=2000, description="most lines of the agent's log in a report")
