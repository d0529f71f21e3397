"""What the doctor asks of any machine: versions, GPU, disk, ports, certificates, clock, the way out."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from importlib.metadata import version as installed
from pathlib import Path
from shlex import quote

from roundtable.core.errors import IdentityError, RoundtableError
from roundtable.core.evidence.release import release
from roundtable.core.extras import DISTRIBUTION, lacking
from roundtable.core.identity.certificates import certificates_in
from roundtable.core.identity.credentials import (
    CA_CERTIFICATE,
    IDENTITY_CERTIFICATE,
    ISSUING_CERTIFICATE,
    NODE_KEY,
    OPERATOR_ROLES,
    TOKEN,
    Credentials,
    Role,
    load_credentials,
)
from roundtable.core.identity.handshake import check_connection, split_address
from roundtable.core.machine.file_access import modes_count
from roundtable.core.machine.process_facts import user_id
from roundtable.demo import NEEDS
from roundtable.doctor.inquiries import Check, Inquiry

_GIB = 1 << 30
_SOON_DAYS = 30
_CLOCK_SECONDS = 5.0
_CLOCK_WRONG_SECONDS = 60.0


def examine(coordinator: str | None, credentials: Path | None, listen: str, state: Path) -> Iterator[Inquiry]:
    """All probes; `coordinator` and `credentials` may be left out, and what needs them says so."""
    yield from machine()
    yield Inquiry("demo", lambda: [_demo()])
    yield Inquiry("disk", lambda: [disk(state)])
    yield Inquiry("port", lambda: [_port(listen)], remedy="write --listen HOST:PORT")
    yield Inquiry("certificates", lambda: _certificates(credentials), remedy="`roundtable ca issue NAME`")
    yield Inquiry(
        "coordinator", lambda: _coordinator(coordinator, credentials), about=f"reaching {coordinator}"
    )


def machine() -> Iterator[Inquiry]:
    """What holds for every use of this machine: versions and GPU."""
    yield Inquiry("versions", _versions)
    yield Inquiry(
        "gpu", lambda: [_gpu()], about="looking for a GPU", remedy="`nvidia-smi` must answer", seconds=120
    )


def _versions() -> Iterator[Check]:
    from packaging.requirements import Requirement

    yield Check("python", "ok", sys.version.split()[0])
    try:
        wanted = [Requirement(line) for line in requires(DISTRIBUTION) or ()]
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
    if strangers := sorted(set(packages_distributions().get("roundtable", ())) - {DISTRIBUTION}):
        remedy = f"pip uninstall {' '.join(strangers)}, then pip install --force-reinstall {DISTRIBUTION}"
        yield Check("versions", "fail", f"{', '.join(strangers)} brings another package 'roundtable'", remedy)
    if wrong:
        yield Check("versions", "fail", "; ".join(wrong), f"pip install --upgrade {DISTRIBUTION}")
    else:
        yield Check("versions", "ok", f"roundtable {release().version} and all that it needs")


def _demo() -> Check:
    gone, command = lacking(*NEEDS)
    if gone:
        return Check("demo", "warn", f"`roundtable demo` needs {', '.join(gone)}", f"`{command}`")
    return Check("demo", "ok", "all is here that `roundtable demo` needs")


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
    place = standing(state)
    free = shutil.disk_usage(place).free
    message = f"{free / _GIB:.1f} GiB free at {place}"
    if free < _GIB:
        return Check("disk", "fail", message, _space(place))
    if free < 5 * _GIB:
        return Check("disk", "warn", message, _space(place))
    return Check("disk", "ok", message)


def _space(place: Path) -> str:
    return f"`du -xh {quote(str(place))} | sort -h | tail` shows what takes it: models and updates need it"


def standing(folder: Path) -> Path:
    """The folder itself, or what stands of the way to it."""
    return next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())


def folder_writable(name: str, folder: Path, setting: str) -> Check:
    """Whether this user can write there; a folder that is not there yet must be possible to make."""
    place = standing(folder)
    remedy = (
        f"`sudo chown {user_id()} {quote(str(place))}` as the user who runs the service, or set {setting}"
    )
    if not place.is_dir():
        return Check(name, "fail", f"{place} is not a folder", f"set {setting} to a folder")
    try:
        if place == folder.absolute():
            with tempfile.TemporaryFile(dir=place):
                pass
        elif not os.access(place, os.W_OK | os.X_OK):
            message = f"{folder} cannot be made: {place} is not writable by user {user_id()}"
            return Check(name, "fail", message, remedy)
    except OSError as error:
        message = f"{folder} cannot be written by user {user_id()}: {error.strerror}"
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
        return Check("clock", "ok", f"{abs(apart):.1f} s from {other}'s; {_CLOCK_SECONDS:g} s are allowed")
    where = "behind" if apart > 0 else "ahead of"
    return Check(
        "clock",
        "fail" if abs(apart) > _CLOCK_WRONG_SECONDS else "warn",
        f"this machine's clock is {abs(apart):.0f} s {where} {other}'s; {_CLOCK_SECONDS:g} s are allowed, "
        f"and more than {_CLOCK_WRONG_SECONDS:g} s fail",
        "synchronise both with NTP, `sudo timedatectl set-ntp true`: certificates and deadlines need it",
    )


def shown_credentials(folder: Path, role: Role) -> Iterator[Check]:
    """The credentials of a service's folder, which must be of this role; IdentityError for what is wrong."""
    shown = load_credentials(folder)
    if shown.role != role:
        raise IdentityError(f"{folder} is for the {shown.role} {shown.name!r}, not for role {role}")
    yield from _judged(folder, shown)


def remedy_for(role: Role) -> str:
    """How a party of this role comes by its credentials."""
    if role == "agent":
        return "`roundtable client enroll`, or `roundtable ca issue NAME --role agent` by the operator"
    return f"`roundtable ca issue NAME --role {role}`; name the folder in credentials"


def _certificates(credentials: Path | None) -> Iterator[Check]:
    if credentials is None:
        yield Check("certificates", "skipped", "name a folder with --credentials")
        return
    if (credentials / TOKEN).exists():
        yield Check("certificates", "ok", f"{credentials} holds a token; the coordinator says if it holds")
        return
    yield from _judged(credentials, load_credentials(credentials))


def _judged(credentials: Path, shown: Credentials) -> Iterator[Check]:
    key = credentials / NODE_KEY
    if modes_count() and key.stat().st_mode & 0o077:
        remedy = f"`chmod 600 {quote(str(key))}`"
        yield Check("certificates", "warn", f"{key} can be read by others", remedy)
    yield _dated(
        f"{shown.role} {shown.name!r}", shown.expires, f"`roundtable ca issue {shown.name}` makes one"
    )
    # What stands above it: when that ends, it ends with it.
    for name in (CA_CERTIFICATE, ISSUING_CERTIFICATE, IDENTITY_CERTIFICATE):
        file = credentials / name
        if file.exists():
            expires = min(each.not_valid_after_utc for each in certificates_in(file.read_bytes(), file))
            if (dated := _dated(str(file), expires, "`roundtable ca` makes a new one")).state != "ok":
                yield dated


def _dated(what: str, expires: datetime, way: str) -> Check:
    left = expires - datetime.now(UTC)
    message = f"{what}, valid for {left.days} days, until {expires:%Y-%m-%d %H:%M} UTC"
    if left.total_seconds() <= 0:
        return Check("certificates", "fail", f"{what} expired on {expires:%Y-%m-%d %H:%M} UTC", way)
    return Check(
        "certificates",
        "warn" if left.days < _SOON_DAYS else "ok",
        message,
        way if left.days < _SOON_DAYS else "",
    )


def _coordinator(coordinator: str | None, credentials: Path | None) -> Iterator[Check]:
    if coordinator is None or credentials is None:
        yield Check("coordinator", "skipped", "name it with --coordinator and --credentials")
        yield Check(
            "clock", "ok", f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC (not compared with the coordinator's)"
        )
        return
    if not (credentials / TOKEN).exists():
        role = load_credentials(credentials).role
        check_connection(coordinator, credentials)
        if role not in OPERATOR_ROLES:
            yield Check("coordinator", "ok", f"{coordinator} accepts this {role}'s certificate")
            return
    yield from _status(coordinator, credentials)


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
