"""The doctor tries what a coordinator's settings name: places, a webhook, a collector, the right to write."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import psycopg
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from postgresql import PostgreSQL
from processes import free_port

from roundtable.core.identity.credentials import create_ca, issue
from roundtable.doctor import reach
from roundtable.doctor.doctor_coordinator import examine_coordinator
from roundtable.doctor.inquiries import Check, Inquiry, answers
from roundtable.server import load_server_config
from roundtable.server.storage.artifact_store import ArtifactStore
from roundtable.server.store import Database


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with the credentials of a coordinator."""
    create_ca(tmp_path / "ca")
    issue(tmp_path / "ca", "hub", "coordinator", tmp_path / "credentials", ["127.0.0.1"])
    return tmp_path


def write(folder: Path, more: str = "", **settings: object) -> Path:
    """A coordinator.toml; `more` are tables."""
    values = {"listen": f"127.0.0.1:{free_port()}", **settings}
    file = folder / "coordinator.toml"
    file.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()) + more)
    return file


def of(file: Path, name: str) -> list[Check]:
    return [check for check in answers(examine_coordinator(file)) if check.name == name]


class Service(BaseHTTPRequestHandler):
    """Notes what it is asked for, and answers as its class is told to."""

    asked: list[tuple[str, str, int, str]]
    status = 200
    wakes: threading.Event

    def answer(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        self.asked.append((self.command, self.path, size, self.headers.get("authorization", "")))
        self.rfile.read(size)
        if self.status == 0:
            self.wakes.wait()
            return
        self.send_response(self.status)
        self.end_headers()

    do_HEAD = do_POST = answer

    def log_message(self, format: str, *values: object) -> None:
        """Says nothing."""


@contextmanager
def serving(status: int) -> Iterator[tuple[str, type[Service]]]:
    """The address of a service that answers with this status; 0: never."""
    kind = type("Answers", (Service,), {"asked": [], "status": status, "wakes": threading.Event()})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", kind
        kind.wakes.set()
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("status", "state"), [(200, "ok"), (405, "ok"), (404, "warn"), (503, "warn")])
def test_a_webhook_is_reached_and_nobody_alerted(site: Path, status: int, state: str) -> None:
    with serving(status) as (address, service):
        (check,) = of(write(site, f'[alerts]\nwebhook = "{address}/hook/s3cret"\n'), "webhook")
    assert (check.state, f"status {status}" in check.message) == (state, True)
    assert [asked[:2] for asked in service.asked] == [("HEAD", "/hook/s3cret")]
    assert "s3cret" not in check.message + check.remedy
    assert bool(check.remedy) == (state == "warn")


def test_a_webhook_that_never_answers_holds_up_nothing(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "CALL_SECONDS", 0.2)
    with serving(0) as (address, _), serving(200) as (collector, spans):
        file = write(site, f'[alerts]\nwebhook = "{address}/x"\n', traces=f"{collector}/v1/traces")
        checks = {check.name: check for check in answers(examine_coordinator(file))}
    assert checks["webhook"].state == "fail"
    assert "cannot be reached: " in checks["webhook"].message
    assert "timed out" in checks["webhook"].message
    assert checks["webhook"].remedy.startswith(f"`curl -v -m 10 {address}/`")
    assert checks["traces"].state == "ok"
    assert spans.asked


def test_the_command_for_alerts_is_looked_for_and_not_run(site: Path) -> None:
    program = site / "page"
    file = write(site, f'[alerts]\ncommand = ["{program}"]\n')
    (check,) = of(file, "alerts")
    assert (check.state, f"command -v {program}" in check.remedy) == ("fail", True)
    program.write_text(f"#!/bin/sh\ntouch {site}/alerted\n")
    program.chmod(0o755)
    (check,) = of(file, "alerts")
    assert check.state == "ok"
    assert not (site / "alerted").exists()


def test_a_probe_that_sticks_is_told_with_what_it_found_before() -> None:
    stuck = threading.Event()

    def run() -> Iterator[Check]:
        yield Check("place", "ok", "the first half")
        stuck.wait()

    first, second = Inquiry("place", run, "asking a place", "ask another", seconds=0.05).answer()
    stuck.set()
    assert first.message == "the first half"
    expected = Check("place", "fail", "asking a place: no answer within 0.05 s", "ask another")
    assert second == expected


def test_a_collector_takes_an_empty_export_with_its_keys(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=s3cret")
    with serving(200) as (address, service):
        (check,) = of(write(site, traces=f"{address}/v1/traces"), "traces")
    assert check.state == "ok"
    assert service.asked == [("POST", "/v1/traces", 0, "s3cret")]


def test_a_collector_that_refuses_or_is_not_there(site: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(401) as (address, _):
        (check,) = of(write(site, traces=f"{address}/v1/traces"), "traces")
    assert (check.state, "401" in check.message) == ("fail", True)
    absent = f"http://127.0.0.1:{free_port()}/v1/traces"
    (check,) = of(write(site, traces=absent), "traces")
    assert (check.state, f"no collector takes spans at {absent}" in check.message) == ("fail", True)
    assert "curl -v" in check.remedy
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]


class Refusing(MemoryFileSystem):
    """A bucket whose keys allow no writing."""

    protocol = "refusing"

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if "w" in mode:
            raise PermissionError("Access Denied")
        return super().open(path, mode, **options)


def test_each_place_for_copies_is_tried(site: Path) -> None:
    fsspec.register_implementation("refusing", Refusing, clobber=True)
    places = ["memory://copies", "refusing://copies", str(site / "second"), str(site / "new" / "third")]
    (site / "second").mkdir()
    (site / "state" / "artifacts").mkdir(parents=True)
    checks = of(write(site, copies=places), "copies")
    states = [(check.state, place) for check in checks for place in places if place in check.message]
    assert states == [
        ("ok", places[0]),
        ("fail", places[1]),
        ("warn", places[2]),
        ("ok", places[2]),
        ("ok", places[3]),
    ]
    assert "Access Denied" in checks[1].message
    assert "mend refusing://copies of copies" in checks[1].remedy
    assert "findmnt -T" in checks[2].remedy
    assert list((site / "second").iterdir()) == []
    assert not (site / "new").exists(), "the doctor makes no folder"
    assert not [name for name in MemoryFileSystem.store if name.startswith("/copies")]


def test_artifacts_are_renamed_as_uploads_are(site: Path) -> None:
    file = write(site)
    artifacts = Path(load_server_config(file).artifacts)
    ArtifactStore(artifacts, "me")
    (check,) = of(file, "artifacts")
    assert (check.state, "can be renamed" in check.message) == ("ok", True)
    assert list((artifacts / "partial").iterdir()) == list((artifacts / "objects").glob("*/*")) == []
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == site.stat().st_dev:
        pytest.skip("a second file system is needed, such as /dev/shm")
    elsewhere = Path(tempfile.mkdtemp(dir=memory))
    try:
        (artifacts / "partial").rmdir()
        (artifacts / "partial").symlink_to(elsewhere)
        (check,) = of(file, "artifacts")
        assert list(elsewhere.iterdir()) == []
    finally:
        shutil.rmtree(elsewhere)
    assert check.state == "fail"
    assert "cross-device" in check.message
    assert f"`df {artifacts}/partial {artifacts}/objects`" in check.message


def test_certificates_that_end_soon_are_named(site: Path) -> None:
    shutil.rmtree(site / "credentials")
    start = datetime.now(UTC) - timedelta(days=350)
    issue(site / "ca", "hub", "coordinator", site / "credentials", ["127.0.0.1"], start=start)
    node, identity = of(write(site), "certificates")
    assert (node.state, "valid for 14 days" in node.message) == ("warn", True)
    assert "roundtable ca issue hub" in node.remedy
    assert "identity.crt" in identity.message


@pytest.fixture(scope="module")
def postgresql() -> Iterator[PostgreSQL]:
    server = PostgreSQL()
    yield server
    server.remove()


def test_the_right_to_write_is_tried(site: Path, postgresql: PostgreSQL) -> None:
    address = postgresql.fresh()
    (check,) = of(write(site, database=address), "database")
    assert "will be made at the first start" in check.message
    Database.open(address).close()
    name = address.rsplit("/", 1)[1]
    with psycopg.connect(address, autocommit=True) as connection:
        before = connection.execute("SELECT count(*) FROM pg_class").fetchone()
        (check,) = of(write(site, database=address), "database")
        assert (check.state, "as this version needs" in check.message) == ("ok", True)
        assert connection.execute("SELECT count(*) FROM pg_class").fetchone() == before
        connection.execute("CREATE ROLE reader LOGIN")
        mine = address.replace("roundtable@", "reader@")
        (check,) = of(write(site, database=mine), "database")
        assert check.state == "fail"
        assert re.search(r"user reader may not read and write alembic_version, .*artifacts", check.message)
        command = check.remedy.partition('-c "')[2].partition('"')[0]
        assert command.startswith("GRANT ")
        connection.execute(command.encode())
        (check,) = of(write(site, database=mine), "database")
        assert (check.state, "permission denied for schema" in check.message) == ("fail", True)
        assert check.remedy.endswith('psql ADDRESS -c "GRANT CREATE ON SCHEMA public TO reader"`')
        connection.execute("GRANT CREATE ON SCHEMA public TO reader")
        (check,) = of(write(site, database=mine), "database")
        assert check.state == "ok"
        connection.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on".encode())
    (check,) = of(write(site, database=address), "database")
    assert (check.state, "read-only transaction" in check.message) == ("fail", True)
