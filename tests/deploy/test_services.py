"""Coordinator and agent as services of a real systemd: started, waited for, reloaded, killed, stopped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import free_port
from real_systemd import RealSystemd

from roundtable.core.identity.credentials import create_ca, issue
from roundtable.operator import OperatorClient

COORDINATOR, AGENT = "roundtable-coordinator", "roundtable-agent"
TASK = """
import torch
from roundtable.core import Task

class T(Task):
    def model(self):
        return torch.nn.Linear(2, 1)
    def data(self, site):
        return (torch.ones(8, 2), torch.ones(8, 1)), None
    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().mean()
"""


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[RealSystemd]:
    machine = RealSystemd(tmp_path)
    for user in ("roundtable", "alder"):
        machine.run("useradd", "--system", "--no-create-home", user)
    yield machine
    machine.close()


def install(machine: RealSystemd, *words: str) -> None:
    said = machine.run("roundtable", *words)
    assert "Start it, also at each boot: systemctl enable --now" in said
    machine.run("systemctl", "daemon-reload")


@pytest.mark.timeout(600)
def test_both_services_run_under_a_real_systemd(machine: RealSystemd, tmp_path: Path) -> None:
    port = free_port()
    ca = tmp_path / "ca"
    create_ca(ca)
    issue(ca, "hub", "coordinator", tmp_path / "hub", hosts=("localhost", "127.0.0.1"))
    issue(ca, "olga", "operator", tmp_path / "olga")
    issue(ca, "alder", "agent", tmp_path / "alder")
    settings = f'listen = "127.0.0.1:{port}"\nstate = "/var/lib/rt"\ncredentials = "/etc/rt/hub"\n'
    machine.copy(tmp_path / "hub", "/etc/rt/hub", "roundtable")
    machine.write("/etc/rt/coordinator.toml", settings)
    # The database is away when the service starts: it waits, and says so.
    machine.write("/etc/rt/coordinator.env", "ROUNDTABLE_DATABASE=postgresql://rt@127.0.0.1:1/rt\n")
    install(machine, "server", "install", "/etc/rt/coordinator.toml", "--systemd", "--user", "roundtable")
    machine.run("systemctl", "start", "--no-block", COORDINATOR)
    machine.until(lambda: "database" in machine.shows(COORDINATOR, "StatusText"))
    assert machine.shows(COORDINATOR, "ActiveState") == "activating"
    machine.run("systemctl", "stop", COORDINATOR)
    assert machine.shows(COORDINATOR, "ActiveState") == "inactive", "Result: a clean end while it waited"

    # `start` comes back once it serves.
    machine.write("/etc/rt/coordinator.env", "")
    machine.run("systemctl", "start", COORDINATOR)
    assert machine.shows(COORDINATOR, "ActiveState") == "active"
    with OperatorClient(f"localhost:{port}", tmp_path / "olga") as operator:
        assert operator.status().clients_online == 0
        install_agent(machine, tmp_path, port)
        machine.run("systemctl", "start", AGENT)
        machine.until(lambda: operator.status().clients_online == 1)

        first = machine.shows(COORDINATOR, "MainPID")
        for unit in (COORDINATOR, AGENT):
            machine.run("systemctl", "kill", "--signal=HUP", unit)
        machine.run("systemctl", "kill", "--signal=KILL", COORDINATOR)
        machine.until(lambda: machine.shows(COORDINATOR, "NRestarts") == "1")
        machine.until(lambda: machine.shows(COORDINATOR, "ActiveState") == "active")
        assert machine.shows(COORDINATOR, "MainPID") != first
        machine.until(lambda: operator.status().clients_online == 1)
        assert machine.shows(AGENT, "NRestarts") == "0", "SIGHUP and a coordinator that is gone end no agent"

    for unit in (AGENT, COORDINATOR):
        machine.run("systemctl", "stop", unit)
        assert (machine.shows(unit, "ActiveState"), machine.shows(unit, "Result")) == ("inactive", "success")

    # What a person must mend is not tried again.
    machine.write("/etc/rt/coordinator.toml", settings + "no_such_key = 1\n")
    machine.run("systemctl", "start", COORDINATOR, code=1)
    assert machine.shows(COORDINATOR, "ActiveState") == "failed"
    assert (machine.shows(COORDINATOR, "ExecMainStatus"), machine.shows(COORDINATOR, "NRestarts")) == (
        "2",
        "0",
    )


def install_agent(machine: RealSystemd, folder: Path, port: int) -> None:
    machine.copy(folder / "alder", "/etc/rt/alder", "alder")
    machine.write("/etc/rt/t.py", TASK)
    machine.write(
        "/etc/rt/agent.toml",
        f'coordinator = "localhost:{port}"\ncredentials = "/etc/rt/alder"\nstate = "/var/lib/alder"\n'
        '[tasks]\nt = "t.py:T"\n[limits]\ndevice = "cpu"\nthreads = 1\n',
    )
    install(machine, "client", "--config", "/etc/rt/agent.toml", "install", "--systemd", "--user", "alder")
