"""What is wrong with a coordinator's settings: the doctor names it; the coordinator refuses in one line."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from postgresql import PostgreSQL
from powerless import errors_of, powerless
from processes import free_port
from service import running

from roundtable.cli.main import run
from roundtable.core.identity.credentials import create_ca, issue
from roundtable.doctor.database_checks import database
from roundtable.doctor.doctor_coordinator import examine_coordinator
from roundtable.doctor.inquiries import Check, answers
from roundtable.server import load_server_config

Command = Any


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with a coordinator.toml that is all right."""
    create_ca(tmp_path / "ca")
    issue(tmp_path / "ca", "hub", "coordinator", tmp_path / "credentials", ["127.0.0.1"], enrols=True)
    issue(tmp_path / "ca", "ada", "operator", tmp_path / "ada")
    write(tmp_path)
    return tmp_path


def write(folder: Path, **settings: object) -> Path:
    """The settings file, on ports that are free."""
    values = {"listen": f"127.0.0.1:{free_port()}", **settings}
    file = folder / "coordinator.toml"
    file.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()))
    return file


def failing(file: Path) -> list[Check]:
    return [check for check in answers(examine_coordinator(file)) if check.state == "fail"]


def found(file: Path, name: str) -> Check:
    """The only failure, which must be of this name and have a remedy."""
    (check,) = failing(file)
    assert check.name == name, check
    assert check.remedy
    return check


def refused(roundtable: Command, file: Path, code: int = 1) -> str:
    """The one line that `roundtable server` ends with."""
    said = roundtable("server", file)
    assert said.code == code, said
    assert "Traceback" not in said.err
    assert said.out == ""
    (line,) = errors_of(said.err)
    return line


def test_a_sound_folder_has_nothing_to_say(site: Path, roundtable: Command) -> None:
    said = roundtable("doctor", "--json", "--server", site / "coordinator.toml")
    checks = {check["name"]: check for check in json.loads(said.out)}
    assert said.code == 0, checks
    assert {"settings", "certificates", "port", "state", "artifacts", "disk", "database"} <= set(checks)
    assert "will be made" in checks["database"]["message"]
    assert not (site / "state").exists()


async def test_it_may_be_asked_beside_a_running_coordinator(site: Path) -> None:
    file = write(site)
    async with running(load_server_config(file)):
        checks = {check.name: check for check in answers(examine_coordinator(file))}
    assert "runs at" in checks["port"].message
    assert checks["database"].message.endswith("as this version needs")
    assert all(check.state != "fail" for check in checks.values())


def test_settings_that_are_wrong(site: Path, roundtable: Command) -> None:
    file = write(site, listten="127.0.0.1:1")
    assert "did you mean 'listen'" in found(file, "settings").message
    assert "did you mean 'listen'" in refused(roundtable, file, code=2)


def test_a_certificate_that_is_missing_or_anothers(site: Path, roundtable: Command) -> None:
    file = write(site, credentials="nowhere")
    check = found(file, "certificates")
    assert "nowhere" in check.message
    assert "ca issue NAME --role coordinator" in check.remedy
    assert "there is no file" in refused(roundtable, file)
    file = write(site, credentials="ada")
    assert "not for role coordinator" in found(file, "certificates").message
    assert "a coordinator needs its own" in refused(roundtable, file)


def test_a_port_that_another_program_has(site: Path, roundtable: Command) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        listen = f"127.0.0.1:{other.getsockname()[1]}"
        file = write(site, listen=listen)
        check = found(file, "port")
        assert f"{listen} cannot be taken: Address already in use" in check.message
        assert "ss -ltnp" in check.remedy
        assert f"cannot listen on {listen}" in refused(roundtable, file)
        file = write(site, operators=listen)
        assert "set operators to another port" in found(file, "operators").remedy


def test_a_page_of_metrics_whose_port_is_taken(site: Path, roundtable: Command) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        metrics = f"127.0.0.1:{other.getsockname()[1]}"
        file = write(site, metrics=metrics)
        (check,) = [check for check in answers(examine_coordinator(file)) if check.name == "metrics"]
        assert (check.state, f"{metrics} cannot be taken" in check.message) == ("warn", True)
        assert "another port" in check.remedy
        assert metrics in refused(roundtable, file)


def test_enrolment_without_the_issuing_key(site: Path) -> None:
    (site / "credentials" / "issuing.key").unlink()
    check = found(write(site, enrolment=f"127.0.0.1:{free_port()}"), "enrolment")
    assert "--enrols" in check.remedy


def test_a_wrong_path_where_a_folder_should_be(site: Path) -> None:
    (site / "file").write_text("")
    names = {check.name for check in failing(write(site, state="file"))}
    assert names == {"state", "artifacts", "database"}


@pytest.mark.slow
def test_a_volume_that_cannot_be_written(site: Path) -> None:
    volume = site / "volume"
    volume.mkdir(mode=0o555)
    file = write(site, state=str(volume))
    said = powerless("doctor", "--json", "--server", file)
    assert said.returncode == 1, said.stderr
    checks = [check for check in json.loads(said.stdout) if check["state"] == "fail"]
    assert {check["name"] for check in checks} == {"state", "artifacts", "database"}
    assert f"{volume} cannot be written by user" in checks[0]["message"]
    assert "chown" in checks[0]["remedy"]
    started = powerless("server", file)
    assert started.returncode == 1
    (line,) = errors_of(started.stderr)
    assert f"{volume}/artifacts cannot be used: Permission denied" in line


@pytest.fixture(scope="module")
def postgresql() -> Iterator[PostgreSQL]:
    server = PostgreSQL()
    yield server
    server.remove()


def with_passwords(server: PostgreSQL) -> str:
    """The address of a fresh database whose server asks for a password, "right"."""
    import psycopg

    address = server.fresh()
    with psycopg.connect(address, autocommit=True) as connection:
        connection.execute("CREATE ROLE teller LOGIN SUPERUSER PASSWORD 'right'")
        (rules,) = connection.execute("SHOW hba_file").fetchone() or ("",)
    text = Path(rules).read_text()
    Path(rules).write_text("host all teller 127.0.0.1/32 scram-sha-256\n" + text)
    with psycopg.connect(address, autocommit=True) as connection:
        connection.execute("SELECT pg_reload_conf()")
    return address.replace("roundtable@", "teller:PASSWORD@")


def test_a_databases_password(
    site: Path, postgresql: PostgreSQL, roundtable: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = with_passwords(postgresql)
    wrong = write(site, database=address.replace("PASSWORD", "hidden"))
    check = found(wrong, "database")
    assert "password authentication failed" in check.message
    assert "the password in `database` is wrong" in check.message
    line = refused(roundtable, wrong)
    assert "the password in `database` is wrong" in line
    assert "hidden" not in check.message + line
    unquoted = write(site, database=address.replace("PASSWORD", "hid@den"))
    line = refused(roundtable, unquoted, 2)
    assert "in a password write it as %40" in line
    assert "hid" not in line
    assert "den" not in line
    right = address.replace("PASSWORD", "right")
    assert failing(write(site, database=right)) == []
    nobody = write(site, database=right.replace(right.rsplit("/", 1)[1], "absent"))
    assert "does not exist" in found(nobody, "database").message
    # The database's clock is the only other one that a coordinator knows.
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 3600)
    (clock,) = [check for check in database(right) if check.name == "clock"]
    assert clock.state == "fail"
    assert "3600 s ahead of the database's" in clock.message


def test_no_such_database_server(site: Path) -> None:
    """A server waits for it, with these words; the doctor tells it at once."""
    message = found(
        write(site, database=f"postgresql://u:hidden@127.0.0.1:{free_port()}/x"), "database"
    ).message
    assert "is PostgreSQL running there" in message
    assert "hidden" not in message


def test_the_exit_code_says_that_something_fails(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--server", str(write(site, credentials="nowhere"))]) == 1
    assert "→ `roundtable ca issue" in capsys.readouterr().out
