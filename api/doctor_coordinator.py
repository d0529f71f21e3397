"""`roundtable doctor --server coordinator.toml`: would this coordinator start?"""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import sqlalchemy as sa

from roundtable.core.errors import RoundtableError
from roundtable.core.identity.credentials import NODE_CERTIFICATE, Authority
from roundtable.doctor import Check, clock, disk, folder_writable, machine, shown_credentials, taken
from roundtable.server.config import ServerConfig
from roundtable.server.storage.bucket import Bucket
from roundtable.server.store import Database
from roundtable.settings import coordinator_settings

_PROBE_SECONDS = 3.0


def examine_coordinator(file: Path) -> list[Check]:
    """All checks of a coordinator.toml; changes nothing, and may be run beside the coordinator."""
    try:
        config = coordinator_settings(file)
    except RoundtableError as error:
        return [Check("settings", "fail", str(error), f"mend {file}")]
    state, artifacts = Path(config.state), Path(config.artifacts)
    return [
        Check("settings", "ok", str(file)),
        *machine(),
        *shown_credentials(Path(config.credentials), "coordinator"),
        *_ports(config),
        folder_writable("state", state, "state in coordinator.toml"),
        folder_writable("artifacts", artifacts, "artifacts in coordinator.toml"),
        disk(artifacts),
        *_database(config.database),
        *_bucket(config.bucket),
    ]


def _ports(config: ServerConfig) -> Iterator[Check]:
    yield _port("port", "listen", config.listen, config)
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
    remedy = f"`ss -ltnp` says which program has it; stop that, or set {setting} to another port"
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


def _database(address: str) -> Iterator[Check]:
    try:
        if address.startswith("sqlite"):
            yield _sqlite(Path(address.removeprefix("sqlite:///")), address)
        else:
            yield from _postgresql(address)
    except RoundtableError as error:
        yield Check("database", "fail", str(error), "mend database in coordinator.toml")


def _bucket(address: str) -> Iterator[Check]:
    if not address:
        return
    try:
        before = time.monotonic()
        Bucket(address).probe()
    except RoundtableError as error:
        remedy = "mend bucket in coordinator.toml, or its keys in the environment of the coordinator"
        yield Check("bucket", "fail", str(error), remedy)
    else:
        took = time.monotonic() - before
        yield Check("bucket", "ok", f"{address} keeps what it is given; tried in {took:.2f} s")


def _sqlite(file: Path, address: str) -> Check:
    if not file.exists():
        return Check("database", "ok", f"{file} will be made at the first start")
    folder = folder_writable("database", file.parent, "database in coordinator.toml")
    if folder.state == "fail":
        return folder
    with closing(Database.connect(address)) as database:
        database.look()
    return Check("database", "ok", f"{file} can be read and is of a version that this one knows")


def _postgresql(address: str) -> Iterator[Check]:
    with closing(Database.connect(address)) as database:
        before = time.time()
        database.look()
        with database.transaction() as connection:
            theirs = connection.execute(
                sa.select(sa.func.extract("epoch", sa.func.clock_timestamp()))
            ).scalar_one()
            now = time.time()
        yield Check("database", "ok", f"{database.url} answers in {now - before:.2f} s")
        yield clock(float(theirs) - now, "the database")
