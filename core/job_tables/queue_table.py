"""`[queue]` and `[resources]`: when a coordinator gives the job its turn, and which silos it can use."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from roundtable.core.job_tables.due_times import check_repetition
from roundtable.core.quantities import parse_size
from roundtable.core.toml_tables import Name, Names, Seconds, Table


def _moment(value: object) -> object:
    """RFC 3339 text, as TOML's own date and time or in quotes; it is stored as text, in UTC."""
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            raise ValueError(f"{value!r} is not a time; example: 2026-12-01T20:00:00Z") from None
    if not isinstance(value, datetime):
        raise ValueError(f"{value!r} is not a time; example: 2026-12-01T20:00:00Z")
    if value.tzinfo is None:
        raise ValueError(f"{value.isoformat()} names no time zone; example: 2026-12-01T20:00:00Z")
    try:
        return value.astimezone(UTC).isoformat()
    except OverflowError:
        raise ValueError(f"{value.isoformat()} is beyond all years; example: 2026-12-01T20:00:00Z") from None


def _size(value: str) -> str:
    parse_size(value)
    return value


class QueueTable(Table):
    """`[queue]`: the job's place among the jobs of a coordinator. A simulation begins at once."""

    priority: int = Field(0, ge=-100, le=100, description="higher goes first; waiting raises it")
    project: Name | None = Field(
        None, description="whose share of the silos it counts for; default: the submitter"
    )
    after: Names = Field(
        (), max_length=20, description="jobs, by identifier or name, that are finished before it begins"
    )
    start: Annotated[str, BeforeValidator(_moment)] = Field(
        "1970-01-01T00:00:00+00:00", description="not before this time: 2026-12-01T20:00:00Z"
    )

    repeat: str = Field(
        "",
        max_length=100,
        description='a series of runs at these times, as cron writes them: "0 3 * * *"; a time at which the '
        "last run goes on is left out",
    )
    zone: str = Field("UTC", max_length=60, description="repeat: the time zone, for example Europe/Zurich")

    @model_validator(mode="after")
    def _comes_due(self) -> QueueTable:
        if self.repeat:
            check_repetition(self.repeat, self.zone, self.earliest)
        elif self.zone != "UTC":
            raise ValueError("zone belongs to repeat; start and deadlines state theirs")
        return self

    @property
    def earliest(self) -> float:
        """`start` in Unix time."""
        return datetime.fromisoformat(self.start).timestamp()


Size = Annotated[str, AfterValidator(_size)]
Labels = dict[str, str]


def covers(labels: Mapping[str, str], metadata: Mapping[str, str]) -> bool:
    """Whether a silo's [metadata] has all these labels."""
    return all(metadata.get(label) == value for label, value in labels.items())


class GroupTable(Table):
    """One of `[resources] at_least`: so many silos with these labels."""

    silos: int = Field(ge=1, le=100_000, description="so many of them")
    labels: Labels = Field(min_length=1, max_length=20, description="[metadata] that they declare")


class ResourcesTable(Table):
    """`[resources]`: what each silo must have, and gives to this job while it runs. Others are not asked."""

    gpus: int = Field(0, ge=0, le=10_000, description="GPUs")
    memory: Size | None = Field(None, description='main memory, for example "16GiB"')
    disk: Size | None = Field(None, description='room on the disk of its state folder, for example "50GiB"')
    labels: Labels = Field(
        default_factory=dict, max_length=20, description="[metadata] that it must declare: region = 'north'"
    )
    at_least: list[GroupTable] = Field(
        default_factory=list,
        max_length=20,
        description="silos that are connected, all together, before the job has its turn: "
        "[{ silos = 3, labels = { region = 'north' } }]",
    )
    expected: Seconds | None = Field(
        None, gt=0, description='time that all its rounds take: "4h"; measured once a round has ended'
    )

    @model_validator(mode="after")
    def _some_silo_can_be_both(self) -> ResourcesTable:
        for group in self.at_least:
            for label, value in self.labels.items():
                if (other := group.labels.get(label, value)) != value:
                    raise ValueError(
                        f"at_least waits for silos with {label} = {other!r}, and labels lets the job ask "
                        f"those with {label} = {value!r} alone: no silo is both"
                    )
        return self

    @property
    def memory_bytes(self) -> int:
        """`memory` in bytes; 0 where none is asked for."""
        return 0 if self.memory is None else parse_size(self.memory)

    @property
    def disk_bytes(self) -> int:
        """`disk` in bytes; 0 where none is asked for."""
        return 0 if self.disk is None else parse_size(self.disk)

    @property
    def demand(self) -> dict[str, float]:
        """What the job takes of each silo while it has its turn; bytes of memory and disk."""
        amounts = {
            "jobs": 1.0,
            "gpus": float(self.gpus),
            "memory": float(self.memory_bytes),
            "disk": float(self.disk_bytes),
        }
        return {resource: amount for resource, amount in amounts.items() if amount}

    def suits(self, metadata: Mapping[str, str], has: Mapping[str, float] | None) -> bool:
        """Whether a client that declares this and has this much of each resource can take part.

        One of which nobody knows what it has (None) may have it; a resource that is not named has no limit.
        """
        if not covers(self.labels, metadata):
            return False
        return has is None or all(has.get(name, math.inf) >= least for name, least in self.demand.items())
