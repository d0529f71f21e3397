"""The operator's and the silo administrator's pages, command by command, against real processes."""

from __future__ import annotations

import re
import shlex
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from postgresql import PostgreSQL
from processes import environment, free_port

ROOT = Path(__file__).resolve().parents[2]
OPERATOR, SILO = ROOT / "docs" / "operator.md", ROOT / "docs" / "silo-administrator.md"
# In the order in which two people would do it.
STEPS = [
    (OPERATOR, "Install"),
    (OPERATOR, "On Kubernetes"),
    (OPERATOR, "Invite"),
    (SILO, "Install"),
    (SILO, "The silo's page"),
    (OPERATOR, "Run a job"),
    (OPERATOR, "Many jobs"),
    (OPERATOR, "A relay for a region"),
    (OPERATOR, "The log of a job"),
    (OPERATOR, "Archives of the audit log"),
    (SILO, "Who decides"),
    (SILO, "What operators may read of your log"),
    (OPERATOR, "Watch"),
    (OPERATOR, "Back up"),
    (OPERATOR, "Upgrade"),
    (SILO, "Maintenance"),
    (OPERATOR, "Take a silo out, and back"),
    (OPERATOR, "Ask a silo for a report"),
    (SILO, "When operators ask for a report"),
    (OPERATOR, "Certificates"),
    (SILO, "Stop it at once"),
    (OPERATOR, "Incidents"),
    (OPERATOR, "Jobs that are over"),
]
NOT_RUN = {
    "pipx": "a package index; the whole suite runs on the built wheel",
    "kubectl": "a cluster",
    "helm": "a cluster; tests/deploy/test_charts.py renders the charts",
}
TASK = """
import numpy, torch, roundtable as rt
class Digits(rt.Task):
    def model(self): return torch.nn.Linear(64, 10)
    def data(self, site):
        with numpy.load(site.options["digits"]) as file:
            return (torch.from_numpy(file["images"]), torch.from_numpy(file["labels"])), None
    def loss(self, model, batch): return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
"""
JOB = 'task = "digits"\nrounds = 2\n\n[cohort]\nsize = 1\nminimum = 1\n'
LATER = JOB + "\n[queue]\nstart = 2999-01-01T00:00:00Z\n"


def blocks(page: Path) -> Iterator[tuple[str, str, str]]:
    """(section, language, text) of each fenced block, in order."""
    pattern = r"^#+ (?P<section>[^\n]+)$|^```(?P<language>\w+)\n(?P<text>.*?)^```$"
    section = ""
    for found in re.finditer(pattern, page.read_text(), re.MULTILINE | re.DOTALL):
        section = found["section"] or section
        if found["language"]:
            yield section, found["language"], found["text"]


@dataclass
class Person:
    """Somebody who types what a page says into a folder of their own."""

    folder: Path
    names: dict[str, str]
    environment: dict[str, str]
    services: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    ran: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def put(self, text: str) -> None:
        """A settings file, which says its own name in its first line."""
        name = re.match(r"# (\S+\.toml)\n", text)
        if name:
            (self.folder / name[1]).write_text(self.here(text))

    def here(self, text: str) -> str:
        """The page's names of hosts, ports and folders in terms of this machine."""
        known = "|".join(re.escape(name) for name in sorted(self.names, key=len, reverse=True))
        return re.sub(rf"(?<!\w)(?:{known})(?!\w)", lambda found: self.names[found[0]], text)

    def type(self, line: str) -> str:
        """Does what a line says; its output. Fails the test where the command fails."""
        words = shlex.split(self.here(line), comments=True)
        if words[0] in NOT_RUN:
            self.left.append(line)
            return ""
        self.ran.append(line)
        if words[0] == "export":
            self.environment.update(word.split("=", 1) for word in words[1:])
            return ""
        if words[:2] == ["sudo", "systemctl"]:
            return self.control(words[2], words[-1])
        if line in ("roundtable server coordinator.toml", "roundtable client"):
            return self.start(f"roundtable-{'coordinator' if 'server' in line else 'agent'}")
        if words[0] == "sudo":
            place = words.index("--user")
            words = [*words[1:place], *words[place + 2 :], "--out", str(self.folder)]
        command = " ".join(word if "*" in word else shlex.quote(word) for word in words)
        done = self.run(command)
        print(f"$ {line}\n{done.stdout}{done.stderr}")
        told = done.stdout + done.stderr
        unsigned = words[1:3] == ["audit", "verify"] and done.returncode == 3 and "UNPROVEN" in told
        assert done.returncode == 0 or unsigned, f"$ {line}\n{done.stdout}{done.stderr}"
        return done.stdout

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        command = re.sub(r"^roundtable ", f"{shlex.quote(sys.executable)} -P -m roundtable ", command)
        settings = {"cwd": self.folder, "env": self.environment, "timeout": 90}
        return subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, check=False, **settings
        )

    def control(self, verb: str, service: str) -> str:
        """What systemd would do."""
        if verb in ("enable", "start"):
            return self.start(service)
        process = self.services.pop(service)
        process.terminate()
        said, _ = process.communicate(timeout=60)
        assert process.returncode == 0, said
        return said

    def start(self, service: str) -> str:
        """Starts it, unless it runs, and waits until it says of itself that it is ready."""
        if service in self.services:
            return ""
        words = ("server", "coordinator.toml") if service.endswith("coordinator") else ("client",)
        log = (self.folder / f"{service}.log").open("a")
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "roundtable", *words],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            text=True,
        )
        self.services[service] = process
        port = self.names["9464" if words[0] == "server" else "9465"]
        wanted = "active" if words[0] == "server" else "connected"
        page = f"curl -s http://127.0.0.1:{port}/readyz | grep -q ^{wanted}"
        done = self.run(f"set -e; until {page}; do kill -0 {process.pid}; sleep 0.2; done")
        assert done.returncode == 0, (self.folder / f"{service}.log").read_text()
        return ""

    def end(self) -> None:
        for process in self.services.values():
            process.kill()
            process.wait()


@pytest.fixture
def people(tmp_path: Path) -> Iterator[dict[Path, Person]]:
    """The operator and the administrator, on one machine and in folders of their own."""
    database = PostgreSQL()
    ports = {port: str(free_port()) for port in ("17443", "7443", "7444", "9464", "9465")}
    names = {
        **ports,
        "hub.example.org": "localhost",
        "postgresql://roundtable@db.example.org/roundtable": database.fresh(),
        "/backups": str(tmp_path / "backups"),
        "/srv/digits.npz": str(tmp_path / "digits.npz"),
    }
    (tmp_path / "backups").mkdir()
    draw = np.random.default_rng(1)
    images = draw.random((40, 64), np.float32)
    np.savez(tmp_path / "digits.npz", images=images, labels=draw.integers(0, 10, 40))
    made = {}
    for page in (OPERATOR, SILO):
        folder = tmp_path / page.stem
        folder.mkdir()
        (folder / "digits.py").write_text(TASK)
        (folder / "job.toml").write_text(JOB)
        values = environment()
        for name in [
            name for name in values if name.startswith("ROUNDTABLE_") and name != "ROUNDTABLE_WHEEL"
        ]:
            del values[name]
        made[page] = Person(folder, names, values)
    yield made
    for person in made.values():
        person.end()
    database.remove()


def presented(port: int, folder: Path) -> str:
    """The certificate that the coordinator shows to the holder of these credentials."""
    context = ssl.create_default_context(cafile=folder / "ca.crt")
    context.load_cert_chain(folder / "node.crt", folder / "node.key")
    with (
        socket.create_connection(("localhost", port), timeout=30) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as channel,
    ):
        found = channel.getpeercert(binary_form=True)
    assert found
    return ssl.DER_cert_to_PEM_cert(found)


def test_every_section_with_commands_is_tried() -> None:
    found = [
        (page, section) for page in (OPERATOR, SILO) for section, kind, _ in blocks(page) if kind == "sh"
    ]
    assert set(found) == set(STEPS)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_pages_do_what_they_say(people: dict[Path, Person]) -> None:
    for page, section in STEPS:
        person = people[page]
        for where, language, text in blocks(page):
            if where == section and language == "toml":
                person.put(text)
            for line in text.splitlines() if where == section and language == "sh" else ():
                before(line, people)
                said = person.type(line)
                after(line, said, people)
    left = {line.split()[0] for person in people.values() for line in person.left}
    assert left == set(NOT_RUN), "what is not run has a reason here, and each reason a line"
    assert sum(len(person.ran) for person in people.values()) >= 40


def newest(operator: Person) -> str:
    """The job that was submitted last."""
    jobs = operator.run("roundtable job list --json").stdout
    found = re.search(r'"id": "(\w+)"', jobs)
    assert found, jobs
    return found[1]


def before(line: str, people: dict[Path, Person]) -> None:
    """What is there by then: archives after a year, a log from the coordinator's people, a job in line."""
    operator, silo = people[OPERATOR], people[SILO]
    if line.startswith("roundtable job queue"):
        (operator.folder / "later.toml").write_text(LATER)
        sent = operator.run("roundtable job submit later.toml --json")
        assert sent.returncode == 0, sent.stderr
        operator.names["FINISHED"], operator.names["JOB"] = operator.names["JOB"], newest(operator)
    if line.startswith("roundtable audit") and "state/archives" in line:
        (silo.folder / "state" / "archives").mkdir(exist_ok=True)
    if line.startswith("roundtable audit cross-check coordinator.jsonl"):
        sent = operator.run(f"roundtable audit export -o {silo.folder / 'coordinator.jsonl'}")
        assert sent.returncode == 0, sent.stderr


def after(line: str, said: str, people: dict[Path, Person]) -> None:
    """What somebody would look at, or hand on, after a command."""
    operator, silo = people[OPERATOR], people[SILO]
    hub = operator.folder
    if line.startswith("roundtable invite"):
        silo.environment["ROUNDTABLE_TOKEN"] = max(said.split(), key=len)
    elif line.startswith("roundtable job submit"):
        operator.names["JOB"] = newest(operator)
        assert '"status": "finished"' in operator.run("roundtable job list --json").stdout
    elif line.startswith("roundtable job queue"):
        assert operator.names["JOB"][:6] in said
    elif line.startswith("roundtable job hold"):
        assert "review" in operator.run("roundtable job queue").stdout
        assert operator.run(f"roundtable job cancel {operator.names['JOB']}").returncode == 0
        operator.names["JOB"] = operator.names.pop("FINISHED")
    elif line == "roundtable clients list" and "JOB" not in operator.names:
        assert "north" not in said
    elif line.startswith("sudo roundtable"):
        units = list(people[OPERATOR if "server" in line else SILO].folder.glob("*.service"))
        assert len(units) == 1
    elif line.startswith("curl") and line.endswith("metrics"):
        assert "roundtable_coordinator_active 1.0" in said
    elif line.startswith("cp renewed"):
        port = int(operator.names["7443"])
        assert presented(port, hub / "olga") in (hub / "renewed" / "node.crt").read_text()
    elif line.startswith("roundtable client explain"):
        assert "yes" in said.lower() or "take part" in said
    elif line.startswith("roundtable client jobs"):
        assert operator.names["JOB"][:6] in said
