"""What is wrong with a silo's settings: the doctor names it, and the agent refuses in one line."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import time
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from powerless import errors_of, powerless
from processes import free_port
from scripted_agent import ScriptedAgent

from roundtable.core.identity.credentials import create_ca, issue
from roundtable.doctor.doctor_agent import examine_agent
from roundtable.doctor.inquiries import Check, answers
from roundtable.operator import OperatorClient
from roundtable.proto.agent_pb2 import Heartbeat
from roundtable.server import Coordinator, load_server_config

Command = Any
TASK = """
import torch, roundtable as rt

class Small(rt.Task):
    def model(self):
        return torch.nn.Linear(2, 1)
"""


class Silo:
    """A folder with credentials, a task, and an agent.toml that each test writes anew."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        create_ca(folder / "ca")
        issue(folder / "ca", "hub", "coordinator", folder / "hub", ["127.0.0.1", "localhost"])
        issue(folder / "ca", "olga", "viewer", folder / "olga")
        issue(folder / "ca", "north", "agent", folder / "credentials")
        (folder / "small.py").write_text(TASK)

    def write(self, coordinator: str, more: str = "", tasks: str = 'small = "small.py:Small"') -> Path:
        """The settings; no task is run."""
        file = self.folder / "agent.toml"
        if "[limits]" not in tasks:
            tasks += "\n[limits]\nrehearsal = 0"
        file.write_text(f'coordinator = "{coordinator}"\n{more}\n[tasks]\n{tasks}\n')
        return file

    def coordinator(self, clock: Callable[[], float] = time.time) -> Coordinator:
        settings = {
            "listen": "127.0.0.1:0",
            "state": str(self.folder / "server"),
            "credentials": str(self.folder / "hub"),
        }
        return Coordinator(load_server_config(None, settings), clock=clock)


@pytest.fixture
def silo(tmp_path: Path) -> Silo:
    return Silo(tmp_path)


@pytest.fixture
async def coordinator(silo: Silo) -> AsyncIterator[Coordinator]:
    started = silo.coordinator()
    await started.start()
    yield started
    await started.stop()


async def checks_of(file: Path) -> dict[str, Check]:
    found = await asyncio.to_thread(lambda: list(answers(examine_agent(file))))
    return {check.name: check for check in found}


def failure(file: Path) -> Check:
    """The only failure but that nobody listens where the file says."""
    failed = [check for check in answers(examine_agent(file)) if check.state == "fail"]
    (check,) = [check for check in failed if "127.0.0.1" not in check.message]
    assert check.remedy
    return check


def refused(roundtable: Command, file: Path, code: int = 1) -> str:
    """The one line that `roundtable client` ends with."""
    said = roundtable("client", "--config", file)
    assert said.code == code, said
    assert "Traceback" not in said.err
    (line,) = errors_of(said.err)
    return line


async def test_a_sound_silo(silo: Silo, coordinator: Coordinator) -> None:
    checks = await checks_of(silo.write(f"127.0.0.1:{coordinator.port}"))
    assert {check.state for check in checks.values()} == {"ok"}, checks
    assert checks["clock"].message.endswith("from the coordinator's; 5 s are allowed")
    assert "small: small.py:Small" in checks["tasks"].message


async def test_it_does_the_agent_no_harm_that_runs_elsewhere(silo: Silo, coordinator: Coordinator) -> None:
    async with ScriptedAgent(coordinator.port, silo.folder / "credentials", tasks=("small",)) as agent:
        await agent.say(heartbeat=Heartbeat(state="available"))
        await agent.expect("heartbeat")
        running = coordinator._sessions.get("north")
        checks = await checks_of(silo.write(f"127.0.0.1:{coordinator.port}"))
        assert {check.state for check in checks.values()} == {"ok"}, checks
        assert running is not None
        assert coordinator._sessions.get("north") is running
        with OperatorClient(f"127.0.0.1:{coordinator.port}", silo.folder / "olga") as operator:
            (client,) = await asyncio.to_thread(operator.clients)
        assert list(client.tasks) == ["small"]


async def test_the_command_at_the_silo(silo: Silo, coordinator: Coordinator, roundtable: Command) -> None:
    file = silo.write(f"127.0.0.1:{coordinator.port}")
    said = await asyncio.to_thread(roundtable, "client", "--config", file, "doctor", "--json")
    assert said.code == 0
    assert {"settings", "tasks", "device", "clock"} <= {check["name"] for check in json.loads(said.out)}


async def test_a_clock_that_is_off_by_an_hour(silo: Silo) -> None:
    ahead = silo.coordinator(clock=lambda: time.time() + 3600)
    await ahead.start()
    try:
        clock = (await checks_of(silo.write(f"127.0.0.1:{ahead.port}")))["clock"]
    finally:
        await ahead.stop()
    assert clock.state == "fail"
    assert "3600 s behind the coordinator's" in clock.message
    assert "NTP" in clock.remedy


def test_a_clock_before_the_certificate(silo: Silo, roundtable: Command) -> None:
    shutil.rmtree(silo.folder / "credentials")
    later = datetime.now(UTC) + timedelta(hours=1)
    issue(silo.folder / "ca", "north", "agent", silo.folder / "credentials", start=later)
    file = silo.write(f"127.0.0.1:{free_port()}")
    assert "check this machine's clock" in failure(file).message
    assert "check this machine's clock" in refused(roundtable, file)


def test_a_certificate_that_is_missing(silo: Silo, roundtable: Command) -> None:
    file = silo.write(f"127.0.0.1:{free_port()}", 'credentials = "nowhere"')
    check = failure(file)
    assert (check.name, "client enroll" in check.remedy) == ("certificates", True)
    assert "there is no file" in refused(roundtable, file)


def test_a_name_that_does_not_exist(silo: Silo, roundtable: Command) -> None:
    file = silo.write("coordinator.invalid:7443")
    check = failure(file)
    assert "'coordinator.invalid' cannot be resolved" in check.message
    assert "TCP to port 7443 outwards" in check.remedy


def test_an_address_that_is_none(silo: Silo, roundtable: Command) -> None:
    file = silo.write("https://coordinator.example.org")
    assert failure(file).name == "settings"
    assert "host:port" in refused(roundtable, file, code=2)


async def test_a_port_that_speaks_no_tls(silo: Silo, roundtable: Command) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.2\r\n")
        await reader.read(1)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        file = silo.write(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        check = (await checks_of(file))["coordinator"]
        assert check.state == "fail"
        assert "does not speak TLS" in check.message


async def test_a_coordinator_of_another_authority(
    silo: Silo, coordinator: Coordinator, tmp_path: Path
) -> None:
    create_ca(tmp_path / "other")
    shutil.rmtree(silo.folder / "credentials")
    issue(tmp_path / "other", "north", "agent", silo.folder / "credentials")
    file = silo.write(f"127.0.0.1:{coordinator.port}")
    assert "is from another authority" in (await checks_of(file))["coordinator"].message
    said = await asyncio.to_thread(powerless, "client", "--config", file)
    assert said.returncode == 1
    (line,) = errors_of(said.stderr)
    assert "is from another authority" in line


async def test_a_page_of_metrics_whose_port_is_taken(silo: Silo, coordinator: Coordinator) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        metrics = f"127.0.0.1:{other.getsockname()[1]}"
        file = silo.write(f"127.0.0.1:{coordinator.port}", f'metrics = "{metrics}"')
        check = (await checks_of(file))["metrics"]
        assert (check.state, f"{metrics} cannot be taken" in check.message) == ("warn", True)
        said = await asyncio.to_thread(powerless, "client", "--config", file)
    assert said.returncode == 1
    (line,) = errors_of(said.stderr)
    assert metrics in line


def test_a_gpu_that_is_not_there(silo: Silo, roundtable: Command) -> None:
    file = silo.write(
        f"127.0.0.1:{free_port()}", tasks='small = "small.py:Small"\n[limits]\ndevice = "cuda:99"'
    )
    check = failure(file)
    assert check.name == "device"
    assert "cuda:99" in check.message
    assert "cuda:99" in refused(roundtable, file)


def test_tasks_that_are_missing_or_changed(silo: Silo, roundtable: Command) -> None:
    address = f"127.0.0.1:{free_port()}"
    assert "absent.py" in failure(silo.write(address, tasks='small = "absent.py:Small"')).message
    assert failure(silo.write(address, tasks="")).remedy.startswith("name one in [tasks]")
    assert "offers no task" in refused(roundtable, silo.write(address, tasks=""), code=2)
    pinned = f'small = {{ use = "small.py:Small", blake3 = "{"0" * 64}" }}'
    check = failure(silo.write(address, tasks=pinned))
    assert "not what blake3 allows" in check.message
    assert "roundtable client hash small" in check.remedy


@pytest.mark.slow
def test_a_state_folder_that_cannot_be_written(silo: Silo) -> None:
    (silo.folder / "volume").mkdir(mode=0o555)
    file = silo.write(f"127.0.0.1:{free_port()}", 'state = "volume"')
    said = powerless("client", "--config", file, "doctor", "--json")
    assert [c["name"] for c in json.loads(said.stdout) if c["state"] == "fail"] == ["state", "coordinator"]
    started = powerless("client", "--config", file)
    assert started.returncode == 1
    (line,) = errors_of(started.stderr)
    assert f"the state folder {silo.folder}/volume cannot be used" in line
