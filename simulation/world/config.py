"""The tables below `[simulation]` in a job file: devices, dropouts, attacks; checked like the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, model_validator

from roundtable.core.config import JobConfig
from roundtable.core.errors import ConfigError
from roundtable.core.privacy_table import hides_figures
from roundtable.core.toml import TomlDocument, validate
from roundtable.core.toml_tables import Finite, Seconds, Table

AnyTable = TypeVar("AnyTable", bound=Table)


class Lognormal(Table):
    """A positive quantity that differs between clients: lognormal, written as a number where it does not."""

    median: Finite = Field(gt=0, description="half of the clients lie below it")
    sigma: Finite = Field(0.0, ge=0, description="standard deviation of its logarithm")


def _spread(value: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {"median": float(value)}
    return value


Quantity = Annotated[Lognormal, BeforeValidator(_spread)]


class DevicesTable(Table):
    """`[simulation.devices]`: what clients run on, in virtual time. Without it work takes no time."""

    speed: Quantity | None = Field(None, description="training examples a second; default: infinite")
    download: Quantity | None = Field(None, description="bytes a second; default: infinite")
    upload: Quantity | None = Field(None, description="bytes a second; default: infinite")
    latency: Seconds = Field(0.0, ge=0, description="before a client begins")
    jitter: Finite = Field(
        0.0, ge=0, description="sigma of a lognormal factor on each client's time, drawn anew each round"
    )
    availability: Finite = Field(
        1.0, gt=0, le=1, description="share of each period that a client is online, at a phase of its own"
    )
    period: Seconds = Field(86400.0, gt=0, description="of availability")
    trace: str | None = Field(
        None, description="CSV file of online intervals: client,start,end and optional speed,download,upload"
    )

    @model_validator(mode="after")
    def _consistent(self) -> DevicesTable:
        if self.trace is not None and self.availability != 1.0:
            raise ValueError("the trace says who is online; leave out availability")
        return self


class DropoutsTable(Table):
    """`[simulation.dropouts]`: what goes wrong, each with its probability for a client in a round."""

    dropout: Finite = Field(0.0, ge=0, le=1, description="the client is gone and never answers")
    crash_training: Finite = Field(0.0, ge=0, le=1, description="the client fails in training, and says so")
    crash_upload: Finite = Field(0.0, ge=0, le=1, description="the client trains, then fails to upload")
    crash_evaluation: Finite = Field(0.0, ge=0, le=1, description="the client fails in evaluation")


AttackName = Literal[
    "label_flip",
    "sign_flip",
    "alie",
    "ipm",
    "tuned_alie",
    "tuned_ipm",
    "gaussian",
    "mimic",
    "free_rider",
    "infinities",
    "nan",
]


class AttackTable(Table):
    """`[simulation.attack]`: hostile clients, who act as one and know every honest update of the round."""

    name: AttackName = Field(description="what they do")
    count: int | None = Field(None, ge=1, description="hostile clients in the population")
    fraction: Finite | None = Field(None, gt=0, lt=1, description="the same as a share of the population")
    scale: Finite | None = Field(
        None, description="sign_flip: factor; gaussian, free_rider: standard deviation"
    )
    z: Finite | None = Field(
        None, description="alie: standard deviations from the mean; default: the paper's"
    )
    tau: Finite | None = Field(None, description="ipm: factor on the negative mean; default: 2")
    classes: int | None = Field(None, ge=2, description="label_flip: label y becomes classes - 1 - y")

    @property
    def tuned(self) -> bool:
        """Whether the attackers try several strengths against the job's rule in every round."""
        return self.name.startswith("tuned_")

    @model_validator(mode="after")
    def _consistent(self) -> AttackTable:
        if (self.count is None) == (self.fraction is None):
            raise ValueError("say how many attack: either count or fraction")
        if (self.name == "label_flip") != (self.classes is not None):
            raise ValueError('classes belongs to name = "label_flip", and is needed there')
        for key, names in _ATTACK_KEYS.items():
            if getattr(self, key) is not None and self.name not in names:
                raise ValueError(f"{key} belongs to {' or '.join(names)}, not to {self.name}")
        return self


_ATTACK_KEYS = {"scale": ("sign_flip", "gaussian", "free_rider"), "z": ("alie",), "tau": ("ipm",)}


def attack_table(job: JobConfig) -> AttackTable | None:
    """The job's attack, None for none; ConfigError names the key and what was expected."""
    if not job.simulation.attack:
        return None
    table = _table(AttackTable, job.simulation.attack, "simulation.attack")
    if table.count is not None and table.count >= job.simulation.clients:
        raise ConfigError(
            f"simulation.attack.count = {table.count} leaves nobody honest among "
            f"simulation.clients = {job.simulation.clients}"
        )
    if table.tuned and hides_figures(job.privacy):
        raise ConfigError(
            f"simulation.attack: {table.name} tries the job's rule on single updates, and with [privacy] the "
            f"coordinator has no such rule: use {table.name.removeprefix('tuned_')}"
        )
    return table


def devices_table(job: JobConfig) -> DevicesTable:
    """The job's devices; ConfigError names the key and what was expected."""
    return _table(DevicesTable, job.simulation.devices, "simulation.devices")


def dropouts_table(job: JobConfig) -> DropoutsTable:
    """The job's dropouts; ConfigError names the key and what was expected."""
    return _table(DropoutsTable, job.simulation.dropouts, "simulation.dropouts")


def check_population(job: JobConfig) -> None:
    """Raises ConfigError for a round that asks for more clients than there are."""
    clients, cohort = job.simulation.clients, job.cohort
    keys = {"cohort.size": cohort.size, "cohort.minimum": cohort.minimum, "round.buffer": job.round.buffer}
    for key, wanted in keys.items():
        if wanted is not None and wanted > clients:
            raise ConfigError(
                f"{key} = {wanted} asks for more clients a round than the simulation has: "
                f"simulation.clients = {clients}; raise it, or lower {key}"
            )


def _table(kind: type[AnyTable], values: Mapping[str, Any], name: str) -> AnyTable:
    return validate(kind, TomlDocument(dict(values), name, ""))
