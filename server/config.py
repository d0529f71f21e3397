"""The coordinator's settings: `coordinator.toml`, with options of the command line on top."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from roundtable.core.errors import ConfigError
from roundtable.core.observability.log_levels import DESCRIPTION, LogLevel
from roundtable.core.observability.logs import LogFormat
from roundtable.core.toml import TomlDocument, read_toml, validate
from roundtable.core.toml_tables import ApprovedCode, Name, Seconds, Table
from roundtable.server.auth.oidc import OidcTable
from roundtable.server.auth.page_sessions import DashboardTable
from roundtable.server.auth.quotas import QuotaTable
from roundtable.server.operations.alerts import AlertTable
from roundtable.server.operations.populations import Populations
from roundtable.server.queue.queue_rules import ProjectTable, QueueRules
from roundtable.server.queue.silo_pools import SiloPoolTable


class RootTable(Table):
    """`[root_data.NAME]`: data that the coordinator trusts, for jobs whose task has this name."""

    task: str = Field(description="the coordinator's own code: file.py:Class, module:Class or an entry point")
    data: dict[str, Any] = Field(default_factory=dict, description="the task's site.options")
    parameters: list[str] = Field(
        default_factory=list, description="parameters of that code which a job's [task] table may set"
    )


class RetentionTable(Table):
    """`[retention]`: how many days things stay where they are; 0 is for good."""

    artifacts: float = Field(
        0.0,
        ge=0,
        description="days after a job's end that its models, optimizer states and updates stay; 0: for good",
    )
    events: float = Field(0.0, ge=0, description="days that events of jobs that are over stay; 0: for good")
    audit: float = Field(
        0.0,
        ge=0,
        description="days that entries of the audit log stay in the database before they are archived, with "
        "their seals and a signature; 0: for good",
    )
    logs: float = Field(
        90.0, ge=0, description="days that lines of the logs of jobs, and reports of silos, stay; 0: for good"
    )


class ServerConfig(Table):
    """A whole `coordinator.toml`. Relative paths are below the file's folder."""

    listen: str = Field("0.0.0.0:7443", description="address and port; port 0 takes a free one")
    state: str = Field("state", description="folder of the embedded database and the artifacts")
    database: str = Field(
        "", description="sqlite:///… or postgresql://…; default: coordinator.db in the state folder"
    )
    artifacts: str = Field(
        "",
        description="folder of models and updates, with a bucket their cache; default: artifacts in the "
        "state folder",
    )
    bucket: str = Field(
        "",
        description="object store that holds them all, as fsspec names it: s3://bucket/prefix; empty: none",
    )
    credentials: str = Field(
        "credentials",
        description="folder with ca.crt, node.crt and node.key, as `roundtable ca issue` makes it",
    )
    enrolment: str = Field(
        "",
        description="address and port without client certificates, for invited silos and operators with "
        "tokens; empty: there is none",
    )
    operators: str = Field(
        "",
        description="address and port where operators connect, with certificates, so that `listen` is for "
        "agents and relays alone; empty: operators connect at `listen`, too",
    )
    certificate_days: float = Field(
        90.0, gt=0, le=800, description="validity of an enrolled silo's certificates; renewed by themselves"
    )
    oidc: OidcTable | None = Field(None, description="operators of an identity provider")
    heartbeat: Seconds = Field(
        10.0, gt=0, le=600, description="between an agent's signs of life; three missing ones end its session"
    )
    announce: str = Field(
        "", description="host:port under which others reach this coordinator; default: what it listens on"
    )
    lease: Seconds = Field(
        6.0,
        ge=1,
        le=600,
        description="PostgreSQL: a coordinator that is silent for so long is replaced by one that stands by",
    )
    max_artifact_bytes: int = Field(1 << 40, ge=1, description="largest model that operators may store")
    keep_models: int = Field(
        5, ge=1, description="models kept of each job: the newest so many, and always the initial one"
    )
    keep_every: int = Field(
        0, ge=0, description="and the model of every so-manyth round, for good; 0 keeps no others"
    )
    keep_wanted: int = Field(
        100, ge=0, description="models that a job may have kept by its [keep] every, over all its rounds"
    )
    keep_updates: int = Field(
        0,
        ge=0,
        description="newest rounds of each job whose updates stay, so that an auditor can make their models "
        "again; never at levels whose updates nobody else may read",
    )
    copies: list[str] = Field(
        default_factory=list,
        description="further places for models, as fsspec takes them: /mnt/second, s3://bucket/prefix",
    )
    combine: Literal["threads", "processes", "ray"] = Field(
        "threads",
        description="where blocks of the columns of large rounds are combined: threads of the coordinator, "
        "processes beside it, or a Ray cluster (RAY_ADDRESS) of yours; the same bits everywhere",
    )
    combine_workers: int | None = Field(
        None,
        ge=1,
        description="processes, or actors of the cluster, that combine; default: one for each core",
    )
    retention: RetentionTable = Field(
        default_factory=RetentionTable,
        description="how long jobs keep artifacts, events and their logs",
    )
    quotas: QuotaTable = Field(default_factory=QuotaTable, description="what one caller may hold and use up")
    queue_ageing: Seconds = Field(
        3600.0, gt=0, description="waiting for so long raises a job in the queue by one step of priority"
    )
    queue_turns: int | None = Field(
        None,
        ge=1,
        description="jobs that have their turn at a time; default: as many as the silos have room for",
    )
    queue_priority: int = Field(
        0, ge=-100, le=100, description="the most that data scientists may state; operators move jobs higher"
    )
    projects: dict[str, ProjectTable] = Field(
        default_factory=dict, description="weights and quotas of projects in the queue of jobs, by name"
    )
    pools: dict[Name, SiloPoolTable] = Field(
        default_factory=dict, description="silos that a command starts and ends as jobs wait, by name"
    )
    alerts: AlertTable = Field(default_factory=AlertTable, description="who is told of incidents")

    dashboard: DashboardTable = Field(
        default_factory=DashboardTable, description="the page for people, in a browser"
    )
    metrics: str = Field(
        "", description="address and port of /metrics, /healthz and /readyz, for example 127.0.0.1:9464"
    )
    log_format: LogFormat = Field("console", description="console for people, json for programs")
    log_levels: dict[str, LogLevel] = Field(default_factory=dict, description=DESCRIPTION)
    traces: str = Field(
        "", description="OTLP address for traces of rounds, for example http://127.0.0.1:4318/v1/traces"
    )

    populations: dict[str, list[str]] = Field(
        default_factory=dict,
        description="names of tasks that are about the same silos' data: their jobs spend from one privacy "
        "account, NAME = [tasks]; a task in none has an account of its own",
    )
    encodings: ApprovedCode = Field(
        default_factory=dict,
        description="installed encodings of others that may decode updates here, by name → hash of the code",
    )
    root_data: dict[str, RootTable] = Field(
        default_factory=dict, description="trusted data by task name, for rules such as fltrust"
    )

    @property
    def queue(self) -> QueueRules:
        """How jobs have their turns."""
        return QueueRules(self.queue_ageing, self.queue_turns, self.projects, self.queue_priority)

    @field_validator("populations")
    @classmethod
    def _apart(cls, value: dict[str, list[str]]) -> dict[str, list[str]]:
        Populations(value)
        return value

    @field_validator("bucket")
    @classmethod
    def _store(cls, value: str) -> str:
        if value and "://" not in value:
            raise ValueError(
                f"{value!r} is not an address such as s3://bucket/prefix; a folder is what `artifacts` is for"
            )
        return value

    @field_validator("copies")
    @classmethod
    def _elsewhere(cls, value: list[str], info: ValidationInfo) -> list[str]:
        if info.data.get("bucket") in [place.rstrip("/") for place in value]:
            raise ValueError("the bucket itself is not a place for copies of what it holds")
        return value

    @field_validator("listen", "operators", "enrolment", "metrics")
    @classmethod
    def _address(cls, value: str, info: ValidationInfo) -> str:
        if not value and info.field_name != "listen":
            return value
        host, _, port = value.rpartition(":")
        if not host or not port.isdigit() or int(port) > 65535:
            raise ValueError(f"{value!r} is not host:port, for example 0.0.0.0:7443 or [::]:7443")
        return value


def load_server_config(path: Path | None = None, overrides: Mapping[str, Any] | None = None) -> ServerConfig:
    """The settings of a file, or the defaults; `overrides` (None values are ignored) win.

    Relative paths are made absolute: below the file's folder, or below the working directory.
    Raises ConfigError with file, line, key and what was expected.
    """
    document = read_toml(path) if path else TomlDocument({}, "options", "")
    for key, value in (overrides or {}).items():
        if value is not None:
            document.override(key, str(value) if isinstance(value, Path) else value)
    config = validate(ServerConfig, document)
    base = path.resolve().parent if path else Path.cwd()
    state = base / config.state
    database = config.database or f"sqlite:///{state / 'coordinator.db'}"
    if database.startswith("sqlite:///") and not database.startswith("sqlite:////"):
        database = f"sqlite:///{base / database.removeprefix('sqlite:///')}"
    if ":memory:" in database:
        raise ConfigError("database: a coordinator's database must be a file; :memory: would lose every job")
    return config.model_copy(
        update={
            "state": str(state),
            "database": database,
            "artifacts": str(base / config.artifacts) if config.artifacts else str(state / "artifacts"),
            "credentials": str(base / config.credentials),
            "root_data": {name: _below(base, table) for name, table in config.root_data.items()},
            "dashboard": config.dashboard.below(base),
        }
        | ({"oidc": config.oidc.below(base)} if config.oidc else {})
    )


def _below(base: Path, table: RootTable) -> RootTable:
    """The table with the path of the task's file made absolute."""
    place, colon, name = table.task.partition(":")
    if not place.endswith(".py"):
        return table
    return table.model_copy(update={"task": f"{base / place}{colon}{name}"})
