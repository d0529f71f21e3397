"""Whose privacy a job spends: the operators' settings and the task say so, and no submitter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from roundtable.core.config import JobConfig
from roundtable.core.errors import PrivacyError
from roundtable.core.privacy_table import ExampleLevel, NoPrivacy
from roundtable.privacy import Budget


class Populations:
    """`[populations]` of coordinator.toml: name → tasks over the same data."""

    def __init__(self, tables: Mapping[str, Sequence[str]] | None = None) -> None:
        """Raises ValueError for a task in two populations."""
        self._by_task: dict[str, str] = {}
        for name, tasks in (tables or {}).items():
            for task in tasks:
                if self._by_task.setdefault(_root(task), name) != name:
                    raise ValueError(
                        f"the task {task!r} is in {self._by_task[_root(task)]!r} and in {name!r}; "
                        "data belong to one population"
                    )

    def of(self, job: JobConfig) -> str:
        """The population whose account the job's charges go to."""
        task = _root(job.task.name)
        return self._by_task.get(task, task)


def check_counted(job: JobConfig, budget: Budget | None) -> None:
    """Raises PrivacyError for a job whose charges would pass the budget of its population unseen."""
    if budget is None or job.releases_sums or not isinstance(job.privacy, NoPrivacy | ExampleLevel):
        return
    what = "it has no guarantee" if isinstance(job.privacy, NoPrivacy) else "the silos alone keep its account"
    raise PrivacyError(
        f"privacy.level = {job.privacy.level!r}: the population {budget.population!r} has a budget of "
        f"epsilon = {budget.epsilon:g}, and this job would pass it unseen: {what}. Use level 'client', "
        "'dp_ftrl', 'distributed' or 'client_local', or have an operator remove the budget"
    )


def _root(task: str) -> str:
    """What `t`, `t.py:T` and `./t.py` have in common: spellings under which a silo runs the same code."""
    name = PurePosixPath(task.partition(":")[0]).name
    return name.lstrip(".").partition(".")[0] or name
