"""The silo's own file, agent.toml: where the coordinator is, and what this silo offers.

    coordinator = "coordinator.example.org:7443"
    credentials = "credentials"         # what `roundtable ca issue NAME --role agent` made
    state = "state"                     # folder for models, finished updates, local state

    [tasks]                             # what may run here: the job's task name → the silo's own code
    digits = "tasks/digits.py:Digits"

    [data]                              # handed to the task as site.options
    path = "/srv/digits.npz"

    [tasks.scans]                       # the same with rules of its own
    use = "tasks/scans.py:Scans"
    blake3 = "5f0c…"                    # only this code; `roundtable client hash scans` prints it
    data = { path = "/srv/scans" }      # all that this task may read

    [encodings]                         # installed encodings of others that jobs may name
    thirds = "9c1e…"                    # only this code; `roundtable client hash --encoding thirds` prints it

    [policy]                            # jobs that ask for more, or offer less, are refused
    secure_aggregation = true
    minimum_cohort = 5
    approval = true                     # a person says yes to each new job

    [log_sharing]                       # what operators may read of the agent's log; without it nothing
    kinds = ["agent"]

Relative paths count from the file's folder.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationInfo, field_validator

from roundtable.client.policy.cluster_table import ClusterTable
from roundtable.client.policy.health_table import HealthTable
from roundtable.client.policy.policy_table import PolicyTable, TaskTable
from roundtable.client.policy.rules import Rules
from roundtable.client.policy.sharing_tables import DiagnosticsTable, LogSharingTable
from roundtable.core.bounds import MOST_LABELS, MOST_TASKS
from roundtable.core.errors import ConfigError, IdentityError
from roundtable.core.identity.credentials import check_name
from roundtable.core.identity.handshake import split_address
from roundtable.core.identity.signing import MOST_RELAYS, PATH_MARK
from roundtable.core.observability.log_levels import DESCRIPTION, LogLevel, LogLevels
from roundtable.core.observability.logs import LogFormat
from roundtable.core.toml import TomlDocument, read_toml, validate
from roundtable.core.toml_tables import ApprovedCode, Seconds, Table


class LimitsTable(Table):
    """`[limits]`: what training may use."""

    device: str = Field("auto", description="cpu, cuda, cuda:1; auto takes a GPU if there is one")
    jobs: int = Field(
        1, ge=1, le=1000, description="jobs whose rounds the coordinator may run here at a time"
    )
    threads: int | None = Field(None, ge=1, description="CPU threads of the training process; default: all")
    cached_models: int = Field(3, ge=1, description="how many downloaded models are kept on disk")
    rehearsal: Seconds = Field(
        300.0,
        ge=0,
        description="time to try each task with a batch, at the agent's start and by doctor; 0: not tried",
    )


class SiloRetention(Table):
    """`[retention]`: how long things stay where they are."""

    audit: float = Field(
        0.0,
        ge=0,
        description="days that entries of audit.jsonl stay in it before they are archived; 0: for good",
    )


class AgentTable(Table):
    """A whole agent.toml."""

    coordinator: str = Field(description="host:port of the coordinator")
    standbys: list[str] = Field(
        default_factory=list, description="host:port of coordinators that take its place when it fails"
    )
    relay: str = Field(
        "",
        description="the relay that may speak for this silo, where `coordinator` is the address of one; of "
        'relays behind each other all, from the silo to the coordinator: "west/east"',
    )
    credentials: str = Field("credentials", description="folder with ca.crt, node.crt and node.key")
    state: str = Field("state", description="folder for models, finished updates and local state")
    tasks: dict[str, str | TaskTable] = Field(
        default_factory=dict,
        max_length=MOST_TASKS,
        description="task name → file.py:Class, module:Class or an entry point; or a table with rules",
    )
    encodings: ApprovedCode = Field(
        default_factory=dict,
        description="encodings of others that jobs may name → hash of the code",
    )
    data: dict[str, Any] = Field(default_factory=dict, description="the task's site.options")
    metrics: str = Field(
        "", description="address and port of /metrics, /healthz and /readyz, for example 127.0.0.1:9465"
    )
    page: str = Field(
        "",
        description="address and port of the silo's own page in a browser, on this machine itself, such as "
        "127.0.0.1:7446; empty: there is none",
    )
    log_format: LogFormat = Field("console", description="console for people, json for programs")
    log_levels: dict[str, LogLevel] = Field(default_factory=dict, description=DESCRIPTION)
    traces: str = Field(
        "", description="OTLP address for traces of rounds, for example http://127.0.0.1:4318/v1/traces"
    )
    metadata: dict[str, str] = Field(
        default_factory=dict,
        max_length=MOST_LABELS,
        description="declared facts for selection, such as region; never data",
    )
    limits: LimitsTable = Field(default_factory=LimitsTable)
    cluster: ClusterTable | None = Field(None, description="train over several devices as one client")
    policy: PolicyTable = Field(default_factory=PolicyTable)
    retention: SiloRetention = Field(
        default_factory=SiloRetention, description="what leaves audit.jsonl when"
    )
    log_sharing: LogSharingTable = Field(
        default_factory=LogSharingTable, description="what operators may read of the agent's log"
    )

    diagnostics: DiagnosticsTable = Field(
        default_factory=DiagnosticsTable, description="reports of this silo that operators ask for"
    )
    health: list[HealthTable] = Field(
        default_factory=list, max_length=20, description="checks of the silo's own: ready for work or not"
    )

    @field_validator("health")
    @classmethod
    def _each_once(cls, value: list[HealthTable]) -> list[HealthTable]:
        names = [table.name for table in value]
        if twice := next((name for name in names if names.count(name) > 1), ""):
            raise ValueError(f"two checks are called {twice!r}")
        return value

    @field_validator("log_sharing")
    @classmethod
    def _of_known_tasks(cls, value: LogSharingTable, info: ValidationInfo) -> LogSharingTable:
        if "figures" in value.kinds and getattr(info.data.get("policy"), "metrics", "all") == "none":
            raise ValueError(
                'kinds holds "figures", lines with losses, and [policy] metrics = "none" lets none leave: '
                "leave one of the two out"
            )
        if unknown := sorted({*(value.tasks or ())} - {*info.data.get("tasks", ())}):
            raise ValueError(f"tasks: [tasks] names no {', '.join(map(repr, unknown))}")
        return value

    @field_validator("policy")
    @classmethod
    def _has_its_device(cls, value: PolicyTable, info: ValidationInfo) -> PolicyTable:
        limits, backend = info.data.get("limits"), getattr(info.data.get("cluster"), "backend", "")
        if value.max_gpus == 0 and limits is not None and limits.device.startswith("cuda"):
            raise ValueError(f"max_gpus = 0 allows no GPU, and [limits] device is {limits.device!r}")
        if value.max_gpus == 0 and backend == "nccl":
            raise ValueError("max_gpus = 0 allows no GPU, and [cluster] backend is 'nccl'")
        return value

    @field_validator("relay")
    @classmethod
    def _party(cls, value: str) -> str:
        try:
            path = value.split(PATH_MARK) if value else []
            for relay in path:
                check_name(relay)
        except IdentityError as error:
            raise ValueError(str(error)) from None
        if len(path) > MOST_RELAYS or len(set(path)) < len(path):
            raise ValueError(f"{value[:80]!r}: at most {MOST_RELAYS} relays can be on the way, each once")
        return value

    @field_validator("metrics", "page")
    @classmethod
    def _port(cls, value: str) -> str:
        host, _, port = value.rpartition(":")
        if value and (not host or not port.isdigit() or int(port) > 65535):
            raise ValueError(f"{value!r} is not host:port, for example 127.0.0.1:9465")
        return value

    @field_validator("coordinator", "standbys")
    @classmethod
    def _address(cls, value: str | list[str]) -> str | list[str]:
        try:
            for address in [value] if isinstance(value, str) else value:
                split_address(address)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return value


@dataclass(frozen=True)
class AgentConfig:
    """What an agent needs to know, with absolute paths; `folder` is where task files are looked up.

    A file has tasks tried at the start unless it says otherwise, and what is made by a program does not.
    """

    coordinator: str
    credentials: Path
    state: Path
    tasks: Mapping[str, str] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    device: str = "auto"
    jobs: int = 1
    threads: int | None = None
    cached_models: int = 3
    rehearsal: float = 0.0
    encodings: Mapping[str, str] = field(default_factory=dict)
    policy: PolicyTable = field(default_factory=PolicyTable)
    cluster: ClusterTable | None = None
    folder: Path = field(default_factory=Path.cwd)
    standbys: tuple[str, ...] = ()
    relay: str = ""
    task_tables: Mapping[str, TaskTable] = field(default_factory=dict)
    metrics: str = ""
    page: str = ""
    log_format: LogFormat = "console"
    log_levels: LogLevels = field(default_factory=dict)
    traces: str = ""
    archive_days: float = 0.0
    log_sharing: LogSharingTable = field(default_factory=LogSharingTable)
    diagnostics: DiagnosticsTable = field(default_factory=DiagnosticsTable)
    health: tuple[HealthTable, ...] = ()

    def rules(self) -> Rules:
        """The silo's rules, with its tasks and folder."""
        on_cluster = self.cluster is not None
        return Rules(self.policy, self.tasks, self.task_tables, self.encodings, self.folder, on_cluster)

    def reference_of(self, task: str) -> str | None:
        """The silo's own code for a job's task; None if the silo does not offer it.

        A job may name its task by a file or a class (`digits.py`, `tasks/digits.py:Digits`): the
        silo knows it by the plain name, here `digits`.
        """
        if task in self.tasks:
            return self.tasks[task]
        return self.tasks.get(Path(task.partition(":")[0]).stem)


def load_agent_config(path: Path, overrides: Mapping[str, Any] | None = None) -> AgentConfig:
    """Reads and checks an agent.toml; `overrides` maps dotted keys to values and wins.

    Raises ConfigError with one line for each mistake: file, line, key, what was expected.
    """
    document: TomlDocument = read_toml(path)
    for key, value in (overrides or {}).items():
        document.override(key, value)
    table = validate(AgentTable, document)
    folder = path.resolve().parent
    tables = {name: task for name, task in table.tasks.items() if isinstance(task, TaskTable)}
    return AgentConfig(
        coordinator=table.coordinator,
        credentials=_absolute(folder, table.credentials),
        state=_absolute(folder, table.state),
        tasks={name: task.use if isinstance(task, TaskTable) else task for name, task in table.tasks.items()},
        task_tables=tables,
        encodings=table.encodings,
        data=table.data,
        metadata=table.metadata,
        device=table.limits.device,
        jobs=table.limits.jobs,
        threads=table.limits.threads,
        cached_models=table.limits.cached_models,
        rehearsal=table.limits.rehearsal,
        policy=table.policy,
        cluster=table.cluster,
        folder=folder,
        standbys=tuple(table.standbys),
        relay=table.relay,
        metrics=table.metrics,
        page=table.page,
        log_format=table.log_format,
        log_levels=table.log_levels,
        traces=table.traces,
        archive_days=table.retention.audit,
        log_sharing=table.log_sharing,
        diagnostics=table.diagnostics,
        health=tuple(table.health),
    )


def _absolute(folder: Path, name: str) -> Path:
    return folder / Path(os.path.expanduser(name))
