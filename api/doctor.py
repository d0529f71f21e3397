"""The checks of `roundtable doctor`: each gives a state, a sentence, and a remedy where one is needed."""

from __future__ import annotations

import shutil
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, requires
from importlib.metadata import version as installed
from pathlib import Path
from typing import Literal

from roundtable.core.errors import RoundtableError
from roundtable.core.handshake import check_connection, split_address
from roundtable.core.identity import NODE_KEY, load_credentials

_GIB = 1 << 30
_SOON_DAYS = 30
_CLOCK_SECONDS = 5.0


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    name: str
    state: Literal["ok", "warn", "fail"]
    message: str
    remedy: str = ""


def examine(coordinator: str | None, credentials: Path | None, listen: str, state: Path) -> list[Check]:
    """All checks; `coordinator` and `credentials` may be left out, and what needs them says so."""
    return [
        *_versions(),
        _gpu(),
        _disk(state),
        _port(listen),
        *_certificates(credentials),
        *_coordinator(coordinator, credentials),
    ]


def _versions() -> Iterator[Check]:
    from packaging.requirements import Requirement

    yield Check("python", "ok", sys.version.split()[0])
    try:
        wanted = [Requirement(line) for line in requires("roundtable") or ()]
    except PackageNotFoundError:
        yield Check(
            "versions", "warn", "roundtable is not installed as a package", "pip install -e . in its folder"
        )
        return
    wrong = []
    for requirement in wanted:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            found = installed(requirement.name)
        except PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing")
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            wrong.append(f"{requirement.name} is {found}, needed {requirement.specifier}")
    if wrong:
        yield Check("versions", "fail", "; ".join(wrong), "pip install --upgrade roundtable")
    else:
        yield Check("versions", "ok", f"roundtable {installed('roundtable')} and all that it needs")


def _gpu() -> Check:
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return Check("gpu", "ok", ", ".join(names))
    if shutil.which("nvidia-smi"):
        return Check(
            "gpu",
            "warn",
            f"there is an NVIDIA driver, but PyTorch {torch.__version__} sees no GPU",
            "install a CUDA build of PyTorch that the driver supports",
        )
    return Check("gpu", "ok", "none; training runs on the CPU")


def _disk(state: Path) -> Check:
    place = next(parent for parent in (state.absolute(), *state.absolute().parents) if parent.exists())
    free = shutil.disk_usage(place).free
    message = f"{free / _GIB:.1f} GiB free at {place}"
    if free < _GIB:
        return Check("disk", "fail", message, "free some space: models and updates are kept on disk")
    if free < 5 * _GIB:
        return Check("disk", "warn", message, "each round needs about clients x model size for a while")
    return Check("disk", "ok", message)


def _port(listen: str) -> Check:
    try:
        host, port = split_address(listen)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except RoundtableError as error:
        return Check("port", "fail", str(error))
    except OSError as error:
        return Check(
            "port",
            "warn",
            f"{listen} cannot be taken: {error.strerror}",
            "fine if the coordinator runs here already; otherwise free it or use --listen with another",
        )
    return Check("port", "ok", f"{listen} is free for a coordinator")


def _certificates(credentials: Path | None) -> Iterator[Check]:
    if credentials is None:
        yield Check("certificates", "ok", "not checked; name a folder with --credentials")
        return
    try:
        shown = load_credentials(credentials)
    except RoundtableError as error:
        yield Check("certificates", "fail", str(error))
        return
    mode = (credentials / NODE_KEY).stat().st_mode & 0o077
    if mode:
        yield Check(
            "certificates",
            "warn",
            f"{credentials / NODE_KEY} can be read by others",
            f"chmod 600 {credentials / NODE_KEY}",
        )
    days = (shown.expires - datetime.now(UTC)).days
    message = f"{shown.role} {shown.name!r}, valid for {days} days"
    if days < _SOON_DAYS:
        yield Check("certificates", "warn", message, "issue a new one soon with `roundtable ca issue`")
    else:
        yield Check("certificates", "ok", message)


def _coordinator(coordinator: str | None, credentials: Path | None) -> Iterator[Check]:
    if coordinator is None or credentials is None:
        yield Check("coordinator", "ok", "not checked; name it with --coordinator and --credentials")
        yield Check("clock", "ok", f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC by this machine, not compared")
        return
    try:
        role = load_credentials(credentials).role
        check_connection(coordinator, credentials)
        if role != "operator":
            yield Check("coordinator", "ok", f"{coordinator} accepts this {role}'s certificate")
            return
        yield from _status(coordinator, credentials)
    except RoundtableError as error:
        yield Check("coordinator", "fail", str(error))


def _status(coordinator: str, credentials: Path) -> Iterator[Check]:
    from roundtable.operator import OperatorClient

    with OperatorClient(coordinator, credentials) as operator:
        before = time.time()
        status = operator.status()
        apart = status.clock - (before + time.time()) / 2
    yield Check(
        "coordinator",
        "ok",
        f"{coordinator} runs {status.version}, {status.clients_online} agents online, "
        f"{status.jobs_running} jobs, {status.disk_free / _GIB:.1f} GiB free",
    )
    if abs(apart) > _CLOCK_SECONDS:
        yield Check(
            "clock",
            "warn",
            f"this machine and the coordinator are {abs(apart):.0f} s apart",
            "synchronise both with NTP: deadlines and certificates depend on time",
        )
    else:
        yield Check("clock", "ok", f"{abs(apart):.1f} s from the coordinator's")
