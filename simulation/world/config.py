"""The tables below `[simulation]` in a job file: devices, dropouts, attacks; checked like the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from roundtable.core.config import JobConfig
from roundtable.core.errors import ConfigError
from roundtable.core.privacy_table import hides_figures
from roundtable.core.quantities import parse_size
from roundtable.core.toml import TomlDocument, validate
from roundtable.core.toml_tables import Finite, Seconds, Table

AnyTable = TypeVar("AnyTable", bound=Table)
WORD = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"


class Lognormal(Table):
    """A positive quantity that differs between clients: lognormal, written as a number where it does not."""

    median: Finite = Field(gt=0, description="half of the clients lie below it")
    sigma: Finite = Field(0.0, ge=0, description="standard deviation of its logarithm")


def _spread(value: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {"median": float(value)}
    return value


Choice = Mapping[str, float]
"""Values, each with its share of the clients."""


def _choice(value: Any) -> Any:
    """One value for all, a list of values in equal shares, or a table of values with their shares."""
    if isinstance(value, list):
        return dict.fromkeys(map(_text, value), 1.0)
    if isinstance(value, Mapping):
        return {key: float(share) if isinstance(share, int) else share for key, share in value.items()}
    return {_text(value): 1.0}


def _text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


_Told = Annotated[str, Field(min_length=1, max_length=500)]
_Shares = Annotated[
    dict[_Told, Annotated[Finite, Field(gt=0)]],
    BeforeValidator(_choice),
    Field(min_length=1, max_length=1000),
]


class MetadataTable(Table):
    """`[simulation.metadata]`, under one key."""

    keys: dict[Annotated[str, Field(min_length=1, max_length=100)], _Shares] = Field(max_length=100)


def amount_of(name: str, text: str) -> float:
    """GPUs as a number, memory and disk in bytes. Raises ValueError for what is neither."""
    if name == "gpus":
        if not (text.isascii() and text.isdigit() and len(text) < 6):
            raise ValueError(f"gpus is a number from 0, not {text!r}")
        return float(text)
    return float(parse_size(text))


class CapacityTable(Table):
    """`[simulation.capacity]`: what clients have, each a value, a list or a table of values with shares."""

    gpus: _Shares | None = Field(None, description="GPUs; default: whatever a job asks for")
    memory: _Shares | None = Field(None, description='main memory: "16GiB"; default: as much as is asked for')
    disk: _Shares | None = Field(None, description='free disk: "50GiB"; default: as much as is asked for')

    @model_validator(mode="after")
    def _amounts(self) -> CapacityTable:
        for name, choice in dict(self).items():
            for text in choice or ():
                amount_of(name, text)
        return self


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
        None,
        description="CSV file of online intervals: client,start,end and optional speed, download, upload, "
        "gpus, memory, disk, selected, completed, metadata.KEY",
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


class RegionsTable(Table):
    """`[simulation.regions]`: clients in regions that add their updates up, in the order of their numbers."""

    count: int | None = Field(None, ge=1, description="regions, as equal as can be")
    members: dict[Annotated[str, Field(pattern=WORD)], Annotated[int, Field(ge=1)]] = Field(
        default_factory=dict, description="instead: regions by name, each with its number of clients"
    )

    @model_validator(mode="after")
    def _consistent(self) -> RegionsTable:
        if (self.count is None) == (not self.members):
            raise ValueError("say what regions there are: either count or members")
        return self


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


def regions_table(job: JobConfig) -> RegionsTable | None:
    """The job's regions, None for none; ConfigError names the key and what was expected."""
    if not job.simulation.regions:
        return None
    table = _table(RegionsTable, job.simulation.regions, "simulation.regions")
    clients, members = job.simulation.clients, sum(table.members.values())
    if table.members and members != clients:
        raise ConfigError(
            f"simulation.regions.members add up to {members} clients, and simulation.clients = {clients}: "
            "each client is in one region"
        )
    if table.count is not None and table.count > clients:
        raise ConfigError(
            f"simulation.regions.count = {table.count} is above simulation.clients = {clients}: "
            "a region has at least one client"
        )
    return table


def metadata_table(job: JobConfig) -> Mapping[str, Choice]:
    """What clients declare: for each key the values and their shares; ConfigError for what is none."""
    try:
        return MetadataTable.model_validate({"keys": job.simulation.metadata}).keys
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"][1:]))
        raise ConfigError(
            f"simulation.metadata.{place}: {first['msg']}; a text, a list of texts, or a table of texts with "
            "their shares: region = { north = 0.7, south = 0.3 }"
        ) from error


def capacity_table(job: JobConfig) -> Mapping[str, Choice]:
    """What clients have: for each resource the amounts and their shares; ConfigError for what is none."""
    table = _table(CapacityTable, job.simulation.capacity, "simulation.capacity")
    return {name: choice for name, choice in dict(table).items() if choice is not None}


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
