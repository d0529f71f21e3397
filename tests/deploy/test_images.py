"""What compose file and chart start, as an engine would: read-only root, an ordinary user, no capability."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from containers import Engine, image_of, installed, need_namespaces, volumes_of
from postgresql import PostgreSQL

from roundtable.core.evidence.release import BUILT, release, written
from roundtable.core.identity.credentials import create_ca, issue

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "deploy" / "docker"
DOCKERFILE = DOCKER / "Dockerfile"
PATIENCE = 240.0
# Two environments with torch are installed first.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By target, what the image's own commands install of a wheel that is built from a copy of the source."""
    need_namespaces()
    folder = tmp_path_factory.mktemp("images")
    ignored = shutil.ignore_patterns(".git", ".venv", "build", "*.egg-info", "__pycache__", "runs")
    shutil.copytree(ROOT, folder / "source", ignore=ignored, symlinks=True)
    (folder / "source" / "core" / "evidence" / BUILT).write_text(written(release()))
    words = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, folder / "source"]
    subprocess.run([sys.executable, *map(str, words)], check=True)
    (wheel,) = folder.glob("*.whl")
    return {
        target: installed(image_of(DOCKERFILE, target), folder / target, wheel, ROOT / "constraints.txt")
        for target in ("coordinator", "agent")
    }


@pytest.fixture
def engine(tmp_path: Path, packages: dict[str, Path]) -> Iterator[Engine]:
    engine = Engine(tmp_path, packages["coordinator"])
    yield engine
    engine.close()


@pytest.fixture
def database() -> Iterator[PostgreSQL]:
    server = PostgreSQL()
    yield server
    server.remove()


def by_socket(server: PostgreSQL) -> tuple[str, Path]:
    """The address of a fresh database for a container that has /run/database, and what to mount there."""
    folder = Path(str(server._folder))
    folder.chmod(0o755)
    name = server.fresh().rpartition("/")[2]
    return f"postgresql://roundtable@/{name}?host=/run/database&port={server.port}", folder


def ends(engine: Engine, name: str, process: subprocess.Popen[bytes]) -> None:
    assert process.wait(PATIENCE) == 0, engine.log(name)


def test_the_demo_of_compose_runs_hardened(
    engine: Engine, packages: dict[str, Path], database: PostgreSQL, tmp_path: Path
) -> None:
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    address, socket = by_socket(database)
    named = tmp_path / "volumes"
    named.mkdir()
    # One network for all here, and so another port for the second silo's page.
    south = tmp_path / "south.toml"
    south.write_text((DOCKER / "silo" / "south.toml").read_text().replace(":9465", ":9466"))

    def start(name: str) -> subprocess.Popen[bytes]:
        service = services[name]
        target = service["build"]["target"]
        image = image_of(DOCKERFILE, target)
        words = [*service.get("entrypoint", image.entrypoint), *service.get("command", image.command)]
        volumes = volumes_of(service, DOCKER, named)
        variables = {**image.variables, **service.get("environment", {})}
        if name == "coordinator":
            variables["ROUNDTABLE_DATABASE"] = address
            volumes["/run/database"] = (socket, False)
        if name == "south":
            volumes["/etc/roundtable/agent.toml"] = (south, True)
        return engine.run(name, words, volumes, variables, packages[target])

    def healthy(name: str) -> bool:
        image = image_of(DOCKERFILE, services[name]["build"]["target"])
        return engine.run("health", image.healthcheck, {}, image.variables).wait(60) == 0

    ends(engine, "prepare", start("prepare"))
    coordinator = start("coordinator")
    end = time.monotonic() + PATIENCE
    while not healthy("coordinator"):
        assert coordinator.poll() is None, engine.log("coordinator")
        assert time.monotonic() < end, engine.log("coordinator")
    silos = [start("north"), start("south")]
    ends(engine, "job", start("job"))
    assert healthy("north")
    assert "finished" in engine.log("job")
    for process in (*silos, coordinator):
        assert process.poll() is None
        process.terminate()
        assert process.wait(60) == 0, [engine.log(name) for name in ("north", "south", "coordinator")]


def test_nothing_outside_the_volumes_can_be_written(engine: Engine) -> None:
    (engine.folder / "volume").mkdir(mode=0o700)
    os.chown(engine.folder / "volume", 10001, 10001)
    volumes = {"/var/lib/roundtable": (engine.folder / "volume", False)}
    probe = "touch /tmp/a /var/lib/roundtable/a; ! touch /etc/roundtable/a; ! touch /opt/a; id -u"
    ends(engine, "probe", engine.run("probe", ["sh", "-ec", probe], volumes, {}))
    said = engine.log("probe")
    assert said.count("Read-only file system") + said.count("Permission denied") == 2
    assert said.splitlines()[-1] == "10001"


def test_of_two_pods_of_the_chart_one_is_active_and_the_other_takes_over(
    engine: Engine, database: PostgreSQL, tmp_path: Path
) -> None:
    manifests = list(
        yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / "roundtable-coordinator.yaml").read_text())
    )
    (settings,) = [manifest["data"] for manifest in manifests if manifest["kind"] == "ConfigMap"]
    (pods,) = [manifest for manifest in manifests if manifest["kind"] == "StatefulSet"]
    (container,) = pods["spec"]["template"]["spec"]["containers"]
    address, socket = by_socket(database)
    sources = {name: tmp_path / name for name in ("settings", "credentials", "artifacts", "ca")}
    for name in ("settings", "artifacts"):
        sources[name].mkdir()
        os.chown(sources[name], 10001, 10001)
    for name, text in settings.items():
        (sources["settings"] / name).write_text(text)
    sources["settings"].chmod(0o755)
    create_ca(sources["ca"])
    hosts = ("hub1.example.org", "hub2.example.org")
    issue(sources["ca"], "hub", "coordinator", sources["credentials"], hosts=hosts, enrols=True)
    sources["credentials"].chmod(0o755)
    for file in sources["credentials"].iterdir():
        # As a secret is mounted for a group of its own.
        file.chmod(0o440)
        os.chown(file, 0, 10001)
    mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
    volumes = {
        mounts[name]["mountPath"]: (sources[name], mounts[name].get("readOnly", False))
        for name in ("settings", "credentials", "artifacts")
    }
    volumes["/run/database"] = (socket, False)
    image = image_of(DOCKERFILE, "coordinator")
    # Each pod has a network of its own.
    engines = [engine, Engine(tmp_path / "second", engine.packages)]

    def start(place: int) -> subprocess.Popen[bytes]:
        name = f"{pods['metadata']['name']}-{place}"
        words = [word.replace("$(POD_NAME)", name) for word in container["args"]]
        variables = {**image.variables, "POD_NAME": name, "ROUNDTABLE_DATABASE": address}
        return engines[place].run(name, [*image.entrypoint, *words], volumes, variables)

    def said(place: int) -> str:
        return engines[place].log(f"{pods['metadata']['name']}-{place}")

    def until(place: int, wanted: str) -> None:
        page = re.findall(
            r"'(http://127\.0\.0\.1:\d+/readyz)'", str(container["readinessProbe"]["exec"]["command"])
        )[0]
        loop = f"until curl -s {page} | grep -q '^{wanted}'; do sleep 0.2; done"
        asked = engines[place].run("probe", ["timeout", "120", "sh", "-c", loop], {}, {})
        assert asked.wait() == 0, said(place)

    try:
        first = start(0)
        until(0, "active")
        start(1)
        until(1, "standing by")
        first.kill()
        until(1, "active")
        assert "takes over" in said(1)
    finally:
        engines[1].close()


def test_an_image_holds_what_it_needs_and_no_more(packages: dict[str, Path]) -> None:
    found = {target: {place.name for place in folder.iterdir()} for target, folder in packages.items()}
    assert {"sqlalchemy", "alembic", "psycopg", "opentelemetry"} <= found["coordinator"]
    assert "opacus" not in found["coordinator"]
    assert {"opacus", "sklearn", "opentelemetry"} <= found["agent"]
    assert not {"sqlalchemy", "alembic", "psycopg"} & found["agent"]
