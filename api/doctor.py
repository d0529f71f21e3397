"""The checks of `roundtable doctor`: each gives a state, a sentence, and a remedy where one is needed."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, requires
from importlib.metadata import version as installed
from pathlib import Path
from typing import Literal

from roundtable.core.errors import RoundtableError
from roundtable.core.evidence.release import release
from roundtable.core.identity.credentials import (
    NODE_KEY,
    OPERATOR_ROLES,
    TOKEN,
    Credentials,
    Role,
    load_credentials,
)
from roundtable.core.identity.handshake import check_connection, split_address

_GIB = 1 << 30
_SOON_DAYS = 30
_CLOCK_SECONDS = 5.0
_CLOCK_WRONG_SECONDS = 60.0


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
        *machine(),
        disk(state),
        _port(listen),
        *_certificates(credentials),
        *_coordinator(coordinator, credentials),
    ]


def machine() -> Iterator[Check]:
    """What holds for every use of this machine: versions and GPU."""
    yield from _versions()
    yield _gpu()


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
            version = installed(requirement.name)
        except PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} is {version}, needed {requirement.specifier}")
    if wrong:
        yield Check("versions", "fail", "; ".join(wrong), "pip install --upgrade roundtable")
    else:
        yield Check("versions", "ok", f"roundtable {release().version} and all that it needs")


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


def disk(state: Path) -> Check:
    """How much is free where the folder is, or will be."""
    place = _standing(state)
    free = shutil.disk_usage(place).free
    message = f"{free / _GIB:.1f} GiB free at {place}"
    if free < _GIB:
        return Check("disk", "fail", message, "free some space: models and updates are kept on disk")
    if free < 5 * _GIB:
        return Check("disk", "warn", message, "each round needs about clients x model size for a while")
    return Check("disk", "ok", message)


def _standing(folder: Path) -> Path:
    """The folder itself, or what stands of the way to it."""
    return next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())


def folder_writable(name: str, folder: Path, setting: str) -> Check:
    """Whether this user can write there; a folder that is not there yet must be possible to make."""
    place = _standing(folder)
    remedy = f"chown it to the user who runs this, or set {setting}"
    if not place.is_dir():
        return Check(name, "fail", f"{place} is no folder", f"set {setting} to a folder")
    try:
        if place == folder.absolute():
            with tempfile.TemporaryFile(dir=place):
                pass
        elif not os.access(place, os.W_OK | os.X_OK):
            message = f"{folder} cannot be made: {place} is not writable by user {os.getuid()}"
            return Check(name, "fail", message, remedy)
    except OSError as error:
        message = f"{folder} cannot be written by user {os.getuid()}: {error.strerror}"
        return Check(name, "fail", message, remedy)
    return Check(name, "ok", f"{folder} can be written")


def taken(listen: str) -> str:
    """Why this machine cannot listen there, as the system says it; empty if it can."""
    host, _, port = listen.rpartition(":")
    try:
        resolved = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(resolved[0], socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(resolved[4])
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _port(listen: str) -> Check:
    try:
        split_address(listen)
    except RoundtableError as error:
        return Check("port", "fail", str(error))
    if reason := taken(listen):
        return Check(
            "port",
            "warn",
            f"{listen} cannot be taken: {reason}",
            "fine if the coordinator runs here already; otherwise free it or use --listen with another",
        )
    return Check("port", "ok", f"{listen} is free for a coordinator")


def clock(apart: float, other: str) -> Check:
    """How far this machine's clock is from another's, in seconds; positive where the other is ahead."""
    if abs(apart) <= _CLOCK_SECONDS:
        return Check("clock", "ok", f"{abs(apart):.1f} s from {other}'s")
    where = "behind" if apart > 0 else "ahead of"
    return Check(
        "clock",
        "fail" if abs(apart) > _CLOCK_WRONG_SECONDS else "warn",
        f"this machine's clock is {abs(apart):.0f} s {where} {other}'s",
        "synchronise both with NTP (`timedatectl set-ntp true`): certificates and deadlines depend on time",
    )


def shown_credentials(folder: Path, role: Role) -> Iterator[Check]:
    """The credentials of a service's folder, which must be of this role."""
    try:
        shown = load_credentials(folder)
    except RoundtableError as error:
        yield Check("certificates", "fail", str(error), remedy_for(role))
        return
    if shown.role != role:
        message = f"{folder} is for the {shown.role} {shown.name!r}, not for role {role}"
        yield Check("certificates", "fail", message, remedy_for(role))
        return
    yield from _judged(folder, shown)


def remedy_for(role: Role) -> str:
    """How a party of this role comes by its credentials."""
    if role == "agent":
        return "`roundtable client enroll`, or `roundtable ca issue NAME --role agent` by the operator"
    return f"`roundtable ca issue NAME --role {role}`; name the folder in credentials"


def _certificates(credentials: Path | None) -> Iterator[Check]:
    if credentials is None:
        yield Check("certificates", "ok", "not checked; name a folder with --credentials")
        return
    if (credentials / TOKEN).exists():
        yield Check("certificates", "ok", f"{credentials} holds a token; the coordinator says if it holds")
        return
    try:
        shown = load_credentials(credentials)
    except RoundtableError as error:
        yield Check("certificates", "fail", str(error))
        return
    yield from _judged(credentials, shown)


def _judged(credentials: Path, shown: Credentials) -> Iterator[Check]:
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
        if (credentials / TOKEN).exists():
            yield from _status(coordinator, credentials)
            return
        role = load_credentials(credentials).role
        check_connection(coordinator, credentials)
        if role not in OPERATOR_ROLES:
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
    yield clock(apart, "the coordinator")
