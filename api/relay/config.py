"""The relay's settings: `relay.toml`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from roundtable.core.errors import ConfigError
from roundtable.core.identity.handshake import split_address
from roundtable.core.observability.log_levels import DESCRIPTION, LogLevel, LogLevels
from roundtable.core.observability.logs import LogFormat
from roundtable.core.toml import read_toml, validate
from roundtable.core.toml_tables import Seconds, Table
from roundtable.relay.regional_table import RegionalTable
from roundtable.server.auth.quotas import QuotaTable


class RelayTable(Table):
    """A whole relay.toml. Relative paths are below the file's folder."""

    coordinator: str = Field(description="host:port of the coordinator, to which the relay dials out")
    standbys: list[str] = Field(
        default_factory=list, description="host:port of coordinators that take its place when it fails"
    )
    listen: str = Field("0.0.0.0:7443", description="address and port for agents; port 0 takes a free one")
    credentials: str = Field(
        "credentials",
        description="folder that `roundtable ca issue --role relay` makes; its name is the relay's",
    )
    state: str = Field("state", description="folder for models and for updates that are held")
    heartbeat: Seconds = Field(
        10.0, gt=0, le=600, description="between an agent's signs of life; three missing ones end its session"
    )
    models: int = Field(4, ge=1, description="models that are kept: the newest so many")
    patience: Seconds = Field(
        20.0,
        ge=0,
        le=600,
        description="for which a silo waits for the coordinator's receipt before it gets the relay's own",
    )
    quotas: QuotaTable = Field(default_factory=QuotaTable, description="what one silo may hold and use up")
    regional: RegionalTable | None = Field(
        None, description="for which jobs rounds within the region are run; left out: for none"
    )
    metrics: str = Field(
        "", description="address and port of /metrics, /healthz and /readyz, for example 127.0.0.1:9466"
    )
    log_format: LogFormat = Field("console", description="console for people, json for programs")
    log_levels: dict[str, LogLevel] = Field(default_factory=dict, description=DESCRIPTION)

    @field_validator("coordinator", "standbys")
    @classmethod
    def _remote(cls, value: str | list[str]) -> str | list[str]:
        try:
            for address in [value] if isinstance(value, str) else value:
                split_address(address)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return value

    @field_validator("listen", "metrics")
    @classmethod
    def _local(cls, value: str) -> str:
        host, _, port = value.rpartition(":")
        if value and (not host or not port.isdigit() or int(port) > 65535):
            raise ValueError(f"{value!r} is not host:port, for example 0.0.0.0:7443 or [::]:7443")
        return value


@dataclass(frozen=True)
class RelayConfig:
    """What a relay needs to know, with absolute paths; fields as in `RelayTable`."""

    coordinator: str
    credentials: Path
    state: Path
    listen: str = "0.0.0.0:7443"
    standbys: tuple[str, ...] = ()
    heartbeat: float = 10.0
    models: int = 4
    patience: float = 20.0
    quotas: QuotaTable = field(default_factory=QuotaTable)
    regional: RegionalTable | None = None
    metrics: str = ""
    log_format: LogFormat = "console"
    log_levels: LogLevels = field(default_factory=dict)


def load_relay_config(path: Path, overrides: Mapping[str, Any] | None = None) -> RelayConfig:
    """Reads and checks a relay.toml; `overrides` (None values are ignored) win.

    Raises ConfigError with one line for each mistake: file, line, key, what was expected.
    """
    document = read_toml(path)
    for key, value in (overrides or {}).items():
        if value is not None:
            document.override(key, value)
    table = validate(RelayTable, document)
    base = path.resolve().parent
    values = {name: getattr(table, name) for name in RelayTable.model_fields}
    values |= {"credentials": base / table.credentials, "state": base / table.state}
    return RelayConfig(**{**values, "standbys": tuple(table.standbys)})
