"""What a silo would tell operators who help it: versions, settings, the doctor's findings, the log.

No data of the silo, no keys, no value of `[data]`, nothing that a task prints, no figure of training.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from typing_extensions import override

from roundtable.client.door.incoming import ReportWish
from roundtable.client.policy.config import AgentConfig
from roundtable.client.worker.torch_devices import list_devices
from roundtable.core.config import JobConfig
from roundtable.core.errors import RoundtableError
from roundtable.core.evidence.release import release
from roundtable.core.foreign_text import json_text, printable
from roundtable.core.identity.certificates import SECRET_VARIABLES
from roundtable.core.machine.process_facts import load_average, memory_table
from roundtable.core.observability.logs import place_of
from roundtable.core.observability.released import Tells, is_told
from roundtable.proto import PROTOCOL_VERSION

FORMAT = 1
MOST_BYTES = 256 << 10
Examine = Callable[[], Iterable[Mapping[str, str]]]
"""The doctor's findings: name, state, message and remedy of each. It may block for a minute."""
_LINE = 500
_LEAST_SECRET = 4
_HIDDEN = "(not told)"
_USER_INFO = re.compile(r"(?<=://)[^/@\s]+@")
_KEYS = re.compile(r"-----BEGIN [^-]+-----.*?(-----END [^-]+-----|$)", re.DOTALL)
_LIBRARIES = ("torch", "numpy", "grpcio", "protobuf", "safetensors", "cryptography", "opacus")
_SHOWN = (
    "coordinator standbys metadata device threads cached_models rehearsal archive_days metrics log_format "
    "log_levels traces"
)


class RecentLines(logging.Handler):
    """The newest lines of the agent's log that tell nothing of training."""

    def __init__(self, silo: str, most: int) -> None:
        super().__init__(logging.INFO)
        self._silo = silo
        self._open: set[str] = set()
        self._lines: deque[tuple[float, str, str]] = deque(maxlen=most)

    def admit(self, job: str, config: JobConfig) -> None:
        """The silo takes part in this job; lines about it count if it hides neither cohort nor update."""
        if is_told(config.privacy, Tells.COHORT, Tells.UPDATE):
            self._open.add(job)

    @override
    def emit(self, record: logging.LogRecord) -> None:
        place = place_of(record)
        of_training = getattr(record, "shareable", "agent") != "agent"
        hidden = place["job"] is not None and place["job"] not in self._open
        if not of_training and not hidden and place["silo"] == self._silo:
            text = printable(record.getMessage(), _LINE)
            self._lines.append((record.created, record.levelname.lower(), text))

    def newest_first(self) -> Iterator[dict[str, Any]]:
        """Each line's time, level and text."""
        for moment, level, text in reversed(self._lines.copy()):
            yield {"time": moment, "level": level, "text": text}


@dataclass(frozen=True)
class ReportSources:
    """Where a report comes from; `connection` tells how the agent stands with its coordinator."""

    config: AgentConfig
    silo: str
    lines: RecentLines
    connection: Callable[[], Mapping[str, Any]]
    examine: Examine


def make_report(wish: ReportWish, sources: ReportSources) -> bytes:
    """A report as JSON of at most MOST_BYTES: the oldest lines of the log give way. It may take a minute."""
    config, connection = sources.config, dict(sources.connection())
    try:
        doctor = [dict(check) for check in sources.examine()]
    except RoundtableError as error:
        doctor = [{"name": "doctor", "state": "fail", "message": str(error), "remedy": ""}]
    clean = _cleaner(config)
    report: dict[str, Any] = clean(
        {
            "format": FORMAT,
            "request": wish.request,
            "silo": sources.silo,
            "made": time.time(),
            "versions": _versions(),
            "configuration": _configuration(config),
            "machine": _machine(config.state),
            "connection": connection,
            "doctor": [
                {name: printable(text, 1000) for name, text in check.items()} for check in doctor[:100]
            ],
        }
    )
    size, lines = len(json_text(report, indent=1)) * 2, list[Any]()
    for line in sources.lines.newest_first():
        line = clean(line)
        size += len(json_text(line).encode()) + 20
        if size > MOST_BYTES:
            break
        lines.append(line)
    return json_text({**report, "log": lines[::-1]}, indent=1).encode()


def _versions() -> dict[str, str]:
    own = release()
    versions = {"roundtable": own.version, "commit": own.commit, "protocol": str(PROTOCOL_VERSION)}
    versions |= {"python": platform.python_version(), "system": platform.platform()}
    for name in _LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def _configuration(config: AgentConfig) -> dict[str, Any]:
    shown = {name: getattr(config, name) for name in _SHOWN.split()}
    cluster = config.cluster.model_dump(mode="json", exclude_unset=True) if config.cluster else None
    return {
        **shown,
        "tasks": dict(config.tasks),
        "data": dict.fromkeys(config.data, _HIDDEN),
        "policy": config.policy.model_dump(mode="json", exclude_unset=True),
        "log_sharing": config.log_sharing.model_dump(mode="json", exclude_unset=True),
        "diagnostics": config.diagnostics.model_dump(mode="json"),
        "cluster": cluster,
    }


def _machine(state: Path) -> dict[str, Any]:
    disk = shutil.disk_usage(state)
    told = ("MemTotal", "MemAvailable", "SwapFree")
    memory = {name: size for name, size in memory_table().items() if name in told}
    return {
        "cpus": os.cpu_count(),
        "load": list(load_average()),
        "memory": memory,
        "disk": {"total": disk.total, "free": disk.free},
        "devices": list(list_devices()),
    }


def _lines_of(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _cleaner(config: AgentConfig) -> Callable[[Any], Any]:
    """Takes secrets out of a value: of `[data]`, of the environment, of addresses, and keys."""
    texts = {*_texts_in(config.data), *(os.environ.get(name, "") for name in SECRET_VARIABLES)}
    for table in config.task_tables.values():
        texts |= {*_texts_in(table.data)}
    secrets = sorted((text for text in texts if len(text) >= _LEAST_SECRET), key=len, reverse=True)

    def clean(value: Any) -> Any:
        if isinstance(value, str):
            for secret in secrets:
                value = value.replace(secret, _HIDDEN)
            return _KEYS.sub(_HIDDEN, _USER_INFO.sub("", value))
        if isinstance(value, Mapping):
            return {name: clean(inner) for name, inner in value.items()}
        if isinstance(value, list | tuple):
            return [clean(inner) for inner in value]
        return value

    return clean


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts_in(inner)
