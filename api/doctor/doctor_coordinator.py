"""`roundtable doctor --server coordinator.toml`: would this coordinator start, and reach what it needs?"""

from __future__ import annotations

import shutil
import ssl
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from shlex import quote

from roundtable.core.errors import RoundtableError, StorageError
from roundtable.core.identity.credentials import NODE_CERTIFICATE, Authority
from roundtable.doctor.database_checks import database
from roundtable.doctor.inquiries import Check, Inquiry, known
from roundtable.doctor.machine_checks import (
    disk,
    folder_writable,
    machine,
    remedy_for,
    shown_credentials,
    taken,
)
from roundtable.doctor.reach import place, traces, trying, webhook
from roundtable.server.config import ServerConfig
from roundtable.settings import coordinator_settings

_PROBE_SECONDS = 3.0
_LIMITS = "keys in the environment of the coordinator"


def examine_coordinator(file: Path) -> Iterator[Inquiry]:
    """All probes of a coordinator.toml; they change nothing, and may be run beside the coordinator."""
    try:
        config = coordinator_settings(file)
    except RoundtableError as error:
        yield known(Check("settings", "fail", str(error), f"mend {file}"))
        return
    yield known(Check("settings", "ok", str(file)))
    yield from machine()
    credentials, artifacts = Path(config.credentials), Path(config.artifacts)
    remedy = remedy_for("coordinator")
    yield Inquiry("certificates", lambda: shown_credentials(credentials, "coordinator"), remedy=remedy)
    yield Inquiry("port", lambda: _ports(config), about="asking who has the ports")
    yield Inquiry(
        "state", lambda: [folder_writable("state", Path(config.state), "state in coordinator.toml")]
    )
    yield Inquiry("artifacts", lambda: _artifacts(artifacts), about=f"writing below {artifacts}")
    yield Inquiry("disk", lambda: [disk(artifacts)])
    remedy = "mend database in coordinator.toml; for PostgreSQL `psql ADDRESS -c 'SELECT 1'` must answer"
    yield Inquiry("database", lambda: database(config.database), about="asking the database", remedy=remedy)
    yield from _outside(config, artifacts)


def _outside(config: ServerConfig, artifacts: Path) -> Iterator[Inquiry]:
    if config.bucket:
        remedy = f"mend bucket in coordinator.toml, or its {_LIMITS}"
        yield Inquiry(
            "bucket", partial(place, "bucket", "bucket", config.bucket), f"trying {config.bucket}", remedy
        )
    for address in config.copies:
        remedy = f"mend {address} of copies in coordinator.toml, or its {_LIMITS}"
        asked = partial(place, "copies", "copies", address, artifacts)
        yield Inquiry("copies", asked, f"trying {address}", remedy)
    if config.alerts.webhook:
        address = config.alerts.webhook
        yield Inquiry("webhook", partial(webhook, address), "asking the webhook of [alerts]", trying(address))
    if config.alerts.command:
        yield Inquiry("alerts", partial(_command, config.alerts.command[0]))
    if config.traces:
        remedy = trying(config.traces)
        yield Inquiry("traces", partial(traces, config.traces), f"asking {config.traces}", remedy)


def _command(program: str) -> Iterator[Check]:
    """It is found and not run: it would alert somebody."""
    if shutil.which(program) is None:
        remedy = (
            f"`command -v {quote(program)}` must find it, by the service's PATH; or mend [alerts] command"
        )
        yield Check("alerts", "fail", f"there is no program {program!r} to run for alerts", remedy)
    else:
        yield Check("alerts", "ok", f"{program} is there; not run")


def _ports(config: ServerConfig) -> Iterator[Check]:
    yield _port("port", "listen", config.listen, config)
    if config.operators:
        yield _port("operators", "operators", config.operators, config)
    if config.enrolment:
        yield _port("enrolment", "enrolment", config.enrolment, config)
        try:
            Authority.issuing(Path(config.credentials))
        except RoundtableError as error:
            remedy = "`roundtable ca issue NAME --role coordinator --enrols`"
            yield Check("enrolment", "fail", f"silos cannot be enrolled: {error}", remedy)
    if config.metrics and (reason := taken(config.metrics)):
        yield Check(
            "metrics",
            "warn",
            f"{config.metrics} cannot be taken: {reason}",
            "fine if the coordinator runs already; otherwise set metrics to another port",
        )


def _port(name: str, setting: str, address: str, config: ServerConfig) -> Check:
    reason = taken(address)
    if not reason:
        return Check(name, "ok", f"{address} is free")
    if _is_ours(address, Path(config.credentials)):
        return Check(name, "ok", f"this coordinator runs at {address} already")
    port = address.rpartition(":")[2]
    remedy = (
        f"`ss -ltnp sport = :{port}` says which program has it; stop that, or set {setting} to another port"
    )
    return Check(name, "fail", f"{address} cannot be taken: {reason}", remedy)


def _is_ours(address: str, credentials: Path) -> bool:
    """Whether who listens there shows this coordinator's certificate."""
    host, _, port = address.rpartition(":")
    local = {"0.0.0.0": "127.0.0.1", "[::]": "::1"}.get(host, host.strip("[]"))
    try:
        own = (credentials / NODE_CERTIFICATE).read_text()
        shown = ssl.get_server_certificate((local, int(port)), timeout=_PROBE_SECONDS)
    except OSError:
        return False
    return shown.strip() in own


def _artifacts(folder: Path) -> Iterator[Check]:
    """Writing there, and renaming as an upload is renamed once it is whole."""
    writable = folder_writable("artifacts", folder, "artifacts in coordinator.toml")
    partial_, objects = folder / "partial", folder / "objects"
    if writable.state != "ok" or not (partial_.is_dir() and objects.is_dir()):
        yield writable
        return
    # A coordinator deletes what begins so at its start, should this be killed in between.
    name = f"own.doctor-{time.time_ns():x}"
    try:
        (partial_ / name).touch(mode=0o600)
        try:
            (partial_ / name).rename(objects / name)
            (objects / name).unlink()
        finally:
            (partial_ / name).unlink(missing_ok=True)
    except OSError as error:
        mounts = f"{quote(str(partial_))} {quote(str(objects))}"
        message = f"no file can be written in {partial_} and renamed into {objects}: {error.strerror}"
        raise StorageError(f"{message}; both must be on one file system (`df {mounts}`)") from error
    yield Check("artifacts", "ok", f"{folder} can be written, and what arrives can be renamed")
