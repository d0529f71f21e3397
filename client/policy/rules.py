"""What a silo allows: the `[policy]` and `[tasks]` of its agent.toml, and what they say of a job.

Everything here is decided at the silo, from the job as it came and from this file; the coordinator is
asked nothing. Each objection is one sentence that names the rule.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, time
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from roundtable.client.policy.privacy_rules import privacy_objections
from roundtable.client.policy.task_hash import hash_of_task
from roundtable.core.config import JobConfig
from roundtable.core.errors import TaskError
from roundtable.core.identity.signing import VOUCHED_FOR
from roundtable.core.privacy_table import ExampleLevel, hides_figures
from roundtable.core.toml_tables import Seconds, Table
from roundtable.privacy.secagg import MINIMUM_COHORT

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(KiB|MiB|GiB|TiB)")
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_HOURS = re.compile(r"(\d{1,2}):(\d{2})-(\d{1,2}):(\d{2})")

Metrics = Mapping[str, tuple[float, int]]


class TaskTable(Table):
    """`[tasks.NAME]`: a task with its own rules; `NAME = "reference"` is the same without any."""

    use: str = Field(description="file.py:Class, module:Class or an entry point")
    blake3: str | None = Field(
        None,
        pattern=r"^[0-9a-f]{64}$",
        description="hash of the code that was read and allowed (`roundtable client hash`); no other runs",
    )
    data: dict[str, Any] | None = Field(
        None, description="the task's site.options, in place of [data]: what this task may read"
    )


class PolicyTable(Table):
    """`[policy]`: the least that this silo asks of a job, and the most that it gives."""

    secure_aggregation: bool = Field(False, description="refuse jobs without secure aggregation")
    epsilon: float | None = Field(
        None,
        gt=0,
        description="most that the silo's own account may spend over all jobs",
    )
    delta: float | None = Field(
        None, gt=0, lt=1, description="most of a job where an epsilon is limited; default: 1e-3"
    )
    minimum_cohort: int = Field(
        MINIMUM_COHORT,
        ge=MINIMUM_COHORT,
        description="fewest silos of a job's cohort; in secure aggregation also by default, and checked "
        "against the peers themselves",
    )
    identities: Literal["issuing", "root"] = Field(
        "issuing",
        description="root: in secure aggregation only peers count whose identity the root certified offline",
    )
    client_level_epsilon: float | None = Field(
        None,
        gt=0,
        description="most that a job may spend on hiding a whole silo, by noise that the silos add; others "
        "are refused",
    )
    example_level_epsilon: float | None = Field(
        None, gt=0, description="most that a job may spend on hiding a record; jobs without are refused"
    )
    approval: bool = Field(
        False, description="a person approves each new job: `roundtable client approve JOB`"
    )
    submitters: list[str] | None = Field(
        None,
        description="who may submit: names whose signature a job must carry; token:NAME and oidc:NAME have "
        "no key and count by the coordinator's word; default: anybody",
    )
    public_evaluation: bool = Field(
        False,
        description="this silo's test data are public: metrics on them may leave also for jobs that hide "
        "everything else (privacy.public_evaluation)",
    )
    rounds: int | None = Field(
        None, ge=1, description="most rounds of a job, most updates and most evaluations that leave for it"
    )
    epochs: int | None = Field(
        None, ge=1, description="most passes over the data a round; alone, it refuses jobs that count steps"
    )
    steps: int | None = Field(
        None, ge=1, description="most optimizer steps a round; alone, it refuses jobs that count epochs"
    )
    batch_size: int | None = Field(None, ge=1, description="largest batch")
    seconds: Seconds | None = Field(None, gt=0, description="most time for one step of a round")
    max_memory: str | None = Field(
        None, description='most that the training process may hold in main memory, for example "8GiB"'
    )
    max_gpus: int | None = Field(
        None, ge=0, description="most GPUs of a machine that training may see; 0: it runs on the CPU"
    )
    max_gpu_memory: str | None = Field(
        None, description='most that training may hold of one GPU\'s memory, for example "20GiB"'
    )
    hours: str | None = Field(None, description='when work may begin, local time, for example "20:00-06:00"')
    metrics: Literal["all", "none"] = Field("all", description="none: no metric and no loss leaves the silo")
    metrics_digits: int | None = Field(
        None, ge=0, le=12, description="decimals to which the mean of each metric is rounded before it leaves"
    )

    @property
    def memory_bytes(self) -> int | None:
        """`max_memory` in bytes."""
        return None if self.max_memory is None else _size(self.max_memory)

    @property
    def gpu_memory_bytes(self) -> int | None:
        """`max_gpu_memory` in bytes."""
        return None if self.max_gpu_memory is None else _size(self.max_gpu_memory)

    def bounds(self) -> list[str]:
        """What training may have of the machine, a line for each rule."""
        most, plural = self.max_gpus, "" if self.max_gpus == 1 else "s"
        lines = {
            "max_memory": f"training may hold {self.max_memory} of main memory",
            "max_gpus": f"training sees at most {most} GPU{plural}" if most else "training sees no GPU",
            "max_gpu_memory": f"training may hold {self.max_gpu_memory} of each GPU's memory",
        }
        return [
            f"{sentence} ([policy] {key})"
            for key, sentence in lines.items()
            if getattr(self, key) is not None
        ]

    @field_validator("max_memory", "max_gpu_memory")
    @classmethod
    def _memory_size(cls, value: str | None) -> str | None:
        if value is not None:
            _size(value)
        return value

    @field_validator("hours")
    @classmethod
    def _clock_times(cls, value: str | None) -> str | None:
        if value is not None:
            _hours(value)
        return value


@dataclass(frozen=True)
class Rules:
    """A silo's rules, complete: `references` says which code a job's task is here, `tables` what it may."""

    policy: PolicyTable
    references: Mapping[str, str]
    tables: Mapping[str, TaskTable] = field(default_factory=dict)
    folder: Path = field(default_factory=Path.cwd)

    def objections(self, job: JobConfig, submitter: str | None, now: datetime) -> list[str]:
        """Why this silo does not take part in the job, in sentences; empty if it does.

        `submitter` is the name that a checked signature gives, None for a job without one. The signature is
        the submitter's own, or for one with a token the coordinator's.
        """
        return [
            *self._to_task(job),
            *self._to_submitter(submitter),
            *self._to_size(job),
            *privacy_objections(self.policy, job),
            *self._to_time(now),
        ]

    def to_evaluation(self, job: JobConfig, round: int) -> list[str]:
        """Why metrics of the model of this round do not leave the silo; empty if they do."""
        every, reasons = job.evaluation.every, []
        if every == 0 or (round % every and round != job.rounds):
            reasons.append(f"the job evaluates no model of round {round} (evaluation.every = {every})")
        if hides_figures(job.privacy) and not self.policy.public_evaluation:
            reasons.append(
                "metrics of a single silo would leave it in the clear, and the job hides everything else; "
                "only where this silo's test data are public may they ([policy] public_evaluation = true)"
            )
        return reasons

    def task_name(self, task: str) -> str:
        """The name in `[tasks]` that a job's task has here; its plain name where there is none."""
        return task if task in self.references else Path(task.partition(":")[0]).stem

    def leaving(self, metrics: Metrics) -> dict[str, tuple[float, int]]:
        """What of these sums may leave the silo, rounded as the policy says."""
        if self.policy.metrics == "none":
            return {}
        digits = self.policy.metrics_digits
        if digits is None:
            return dict(metrics)
        sound = {name: (s, n) for name, (s, n) in metrics.items() if n and math.isfinite(s)}
        return {name: (round(total / count, digits) * count, count) for name, (total, count) in sound.items()}

    def _to_task(self, job: JobConfig) -> Iterator[str]:
        name = self.task_name(job.task)
        reference = self.references.get(name)
        if reference is None:
            offered = ", ".join(sorted(self.references)) or "none"
            yield f"this silo does not offer the task {job.task!r}; it offers: {offered} ([tasks])"
            return
        table = self.tables.get(name)
        if table is None or table.blake3 is None:
            return
        try:
            digest = hash_of_task(reference, self.folder)
        except TaskError as error:
            yield str(error)
            return
        if digest != table.blake3:
            yield (
                f"the code of the task {name!r} is not the one that was allowed: its hash begins with "
                f"{digest[:12]}, [tasks.{name}] blake3 with {table.blake3[:12]}"
            )

    def _to_submitter(self, submitter: str | None) -> Iterator[str]:
        allowed = self.policy.submitters
        if allowed is None or submitter in allowed:
            return
        if submitter is None:
            yield "the job is not signed by its submitter, and [policy] submitters names who must have"
        else:
            word = "; to go by the coordinator's word for a token, list it there under that name"
            hint = word if submitter.startswith(VOUCHED_FOR) else ""
            yield f"{submitter!r} may not submit jobs for this silo ([policy] submitters){hint}"

    def _to_size(self, job: JobConfig) -> Iterator[str]:
        policy, asked, private = self.policy, job.algorithm, job.privacy
        steps, batch = asked.steps, asked.batch_size
        if isinstance(private, ExampleLevel):
            steps, batch = private.local_steps or steps, private.batch_size or batch
        if steps is not None and policy.steps is None and policy.epochs is not None:
            yield "the job counts steps, and this silo bounds epochs ([policy] steps)"
        if steps is None and policy.epochs is None and policy.steps is not None:
            yield "the job counts epochs, and this silo bounds steps ([policy] epochs)"
        wishes = [
            ("rounds", job.rounds, policy.rounds),
            ("epochs", asked.passes if steps is None else None, policy.epochs),
            ("steps", steps, policy.steps),
            ("batch_size", batch, policy.batch_size),
        ]
        for name, wanted, most in wishes:
            if wanted is not None and most is not None and wanted > most:
                yield f"the job asks for {name} = {wanted}, and this silo allows {most} ([policy] {name})"

    def _to_time(self, now: datetime) -> Iterator[str]:
        if self.policy.hours is None:
            return
        first, last = _hours(self.policy.hours)
        clock = now.time()
        inside = first <= clock < last if first <= last else clock >= first or clock < last
        if not inside:
            yield f"this silo works from {first:%H:%M} to {last:%H:%M} ([policy] hours)"


def _size(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    size = 0 if match is None else int(float(match[1]) * _UNITS[match[2]])
    if size <= 0:
        raise ValueError(f'{text!r} is no size of memory; write "8GiB" or "500MiB"')
    return size


def _hours(text: str) -> tuple[time, time]:
    match = _HOURS.fullmatch(text.strip())
    try:
        if match is None:
            raise ValueError
        return time(int(match[1]), int(match[2])), time(int(match[3]), int(match[4]))
    except ValueError:
        raise ValueError(f'{text!r} is no span of hours; write "20:00-06:00"') from None
