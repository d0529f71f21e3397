"""The tables `[tasks]` and `[policy]` of agent.toml."""

from __future__ import annotations

import os
import re
from datetime import time
from typing import Any, Literal

from pydantic import Field, field_validator

from roundtable.client.policy.analysis_rules import AnalysesTable
from roundtable.core.bounds import DIGEST
from roundtable.core.quantities import parse_size
from roundtable.core.toml_tables import Seconds, Table
from roundtable.privacy.secagg import MINIMUM_COHORT

_HOURS = re.compile(r"(\d{1,2}):(\d{2})-(\d{1,2}):(\d{2})")


class TaskTable(Table):
    """`[tasks.NAME]`: a task with its own rules; `NAME = "reference"` is the same without any."""

    use: str = Field(description="file.py:Class, module:Class or an entry point")
    blake3: str | None = Field(
        None,
        pattern=rf"^{DIGEST}$",
        description="hash of the code that was read and allowed (`roundtable client hash`); no other runs",
    )
    data: dict[str, Any] | None = Field(
        None, description="the task's site.options, in place of [data]: what this task may read"
    )
    parameters: list[str] = Field(
        default_factory=list,
        description="parameters of the task that jobs may set ([task] in the job file), whatever their "
        "value; others are refused",
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
    stated_epsilon: float | None = Field(
        None,
        gt=0,
        description="most that all jobs whose noise the coordinator adds may promise to spend together, by "
        "its word; jobs without privacy are refused",
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
    bases: list[str] | None = Field(
        None,
        description="folders below which a job's pretrained base may lie; beside them only the cache of "
        "Hugging Face is looked into; default: any folder, where a task lets jobs name one",
    )
    generations: int = Field(
        0,
        ge=0,
        le=1000,
        description="texts that a fine-tuned language model writes on at this silo after each evaluation, "
        "into the state folder, for people here to read: none of it leaves",
    )
    relay_sums: Literal["allow", "refuse"] = Field(
        "allow", description="refuse: no jobs whose relays add updates up (regions.sum) before they go on"
    )
    regional_models: list[str] = Field(
        default_factory=list,
        description="relays whose models this silo works with between rounds that go up (regions.rounds); "
        "none: no jobs that have such rounds",
    )
    hours: str | None = Field(None, description='when work may begin, local time, for example "20:00-06:00"')
    metrics: Literal["all", "none"] = Field(
        "all",
        description="none: no metric and no loss leaves the silo, inside a secure sum neither; algorithms "
        "whose updates tell the loss exactly (qfedavg) are refused, also with metrics_digits",
    )
    metrics_digits: int | None = Field(
        None, ge=0, le=12, description="decimals to which the mean of each metric is rounded before it leaves"
    )

    analyses: AnalysesTable = Field(
        default_factory=AnalysesTable, description="what may be asked of the tables of [data]"
    )

    @property
    def memory_bytes(self) -> int | None:
        """`max_memory` in bytes."""
        return None if self.max_memory is None else parse_size(self.max_memory)

    @property
    def gpu_memory_bytes(self) -> int | None:
        """`max_gpu_memory` in bytes."""
        return None if self.max_gpu_memory is None else parse_size(self.max_gpu_memory)

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

    @field_validator("bases")
    @classmethod
    def _one_path_each(cls, value: list[str] | None) -> list[str] | None:
        if odd := [each for each in value or () if not each.strip() or os.pathsep in each]:
            raise ValueError(f"{odd[0]!r} is no folder's path; list each folder by itself")
        return value

    @field_validator("max_memory", "max_gpu_memory")
    @classmethod
    def _memory_size(cls, value: str | None) -> str | None:
        if value is not None:
            parse_size(value)
        return value

    @field_validator("hours")
    @classmethod
    def _clock_times(cls, value: str | None) -> str | None:
        if value is not None:
            hours_of(value)
        return value


def hours_of(text: str) -> tuple[time, time]:
    """Both ends of a span such as "20:00-06:00". Raises ValueError for any other text."""
    match = _HOURS.fullmatch(text.strip())
    try:
        if match is None:
            raise ValueError
        return time(int(match[1]), int(match[2])), time(int(match[3]), int(match[4]))
    except ValueError:
        raise ValueError(f'{text!r} is not a time range; example: "20:00-06:00"') from None
