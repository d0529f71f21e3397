"""A compose file's services without a container engine: namespaces, a read-only root, an ordinary user.

The image is this machine's own root file system with the wheel under test; what the Dockerfile says of
environment, entry point, command and health check is taken from it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

USER = 10001
# An overlay's upper layer in memory holds mount points only; then the root is closed for writing.
_ROOT = """
set -eu
umask 022
mount -t tmpfs -o mode=755 none /mnt
mkdir /mnt/up /mnt/work /mnt/root
mount -t overlay -o lowerdir=/,upperdir=/mnt/up,workdir=/mnt/work none /mnt/root
cd /mnt/root
mount --rbind /proc proc
mount --rbind /dev dev
mount -t tmpfs -o mode=1777 none tmp
mkdir -p etc/roundtable
{mounts}
mount -o remount,ro,bind /mnt/root
exec chroot . setpriv --reuid {user} --regid {user} --clear-groups --bounding-set=-all --inh-caps=-all \\
    --no-new-privs env -i {environment} sh -c {command}
"""


def need_namespaces() -> None:
    """Skips the test where this process may not make namespaces and overlays."""
    probe = "mount -t tmpfs none /mnt && mkdir /mnt/u /mnt/w /mnt/r && mount -t overlay -o "
    probe += "lowerdir=/,upperdir=/mnt/u,workdir=/mnt/w none /mnt/r && ip link set lo up"
    if os.getuid() != 0 or not shutil.which("unshare") or not shutil.which("setpriv"):
        pytest.skip("only root may make namespaces here; it takes unshare and setpriv (util-linux)")
    done = subprocess.run(["unshare", "-mn", "sh", "-c", probe], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"namespaces cannot be made here: {done.stderr.strip()}")


@dataclass(frozen=True)
class Image:
    """What the Dockerfile says of one target."""

    entrypoint: list[str]
    command: list[str]
    healthcheck: list[str]
    variables: dict[str, str]
    installs: list[list[str]]


def image_of(dockerfile: Path, target: str) -> Image:
    """Reads the stages `base` and `target`."""
    stages = {
        stage.split(" AS ")[1].split("\n")[0]: stage for stage in dockerfile.read_text().split("\nFROM ")[1:]
    }
    text = stages[target]

    def words(pattern: str) -> list[str]:
        match = re.search(pattern, text, re.MULTILINE)
        assert match, f"{target} lacks {pattern}"
        return list(json.loads(match[1]))

    (variables,) = re.findall(r"^ENV (.*)$", stages["base"], re.MULTILINE)
    return Image(
        words(r"^ENTRYPOINT (.*)$"),
        words(r"^CMD (.*)$"),
        words(r"^    CMD (.*)$"),
        dict(word.split("=", 1) for word in variables.split()),
        [shlex.split(line) for line in re.findall(r"pip (install .*?)(?=&&|$)", _joined(text), re.MULTILINE)],
    )


def _joined(text: str) -> str:
    """With continued lines in one, and what a shell would fill in."""
    joined = re.sub(r"\\\n\s*", "", text).replace("$(ls /wheel/*.whl)", "/wheel")
    return joined.replace("${BUCKETS}", "")


def installed(image: Image, folder: Path, wheel: Path, constraints: Path) -> Path:
    """The packages of a clean environment, installed by the image's own commands; from the usual index."""
    venv.create(folder, with_pip=True)
    for words in image.installs:
        line = iter(words)
        kept = [word for word in line if word not in ("--index-url", "--extra-index-url") or not next(line)]
        filled = [
            word.replace("/constraints.txt", str(constraints)).replace("/wheel", str(wheel)) for word in kept
        ]
        subprocess.run([folder / "bin" / "python", "-m", "pip", *filled, "--quiet"], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    return packages


@dataclass
class Engine:
    """Runs containers in one network namespace; `packages` is all that they can import."""

    folder: Path
    packages: Path
    _processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)
        hold = ["unshare", "-n", "sh", "-c", "ip link set lo up && echo up && exec sleep infinity"]
        self._network = subprocess.Popen(hold, stdout=subprocess.PIPE, start_new_session=True)
        assert self._network.stdout is not None
        assert self._network.stdout.readline() == b"up\n"
        self._script = self.folder / "roundtable"
        self._script.write_text("#!/usr/local/bin/python3\nfrom roundtable.cli.main import main\nmain()\n")
        self._script.chmod(0o755)
        self._hosts = self.folder / "hosts"
        self._hosts.write_text("127.0.0.1 localhost coordinator\n")

    def run(
        self,
        name: str,
        words: list[str],
        volumes: dict[str, tuple[Path, bool]],
        variables: dict[str, str],
        packages: Path | None = None,
    ) -> subprocess.Popen[bytes]:
        """Starts a container; `volumes` is target → (source, whether it is read only)."""
        shared = {
            "/usr/local": (Path(sys.base_prefix), True),
            "/opt/packages": (packages or self.packages, True),
            "/opt/bin/roundtable": (self._script, True),
            "/etc/hosts": (self._hosts, True),
        }
        environment = {
            "PATH": "/opt/bin:/usr/local/bin:/usr/bin:/bin",
            "PYTHONPATH": "/opt/packages",
            "LD_LIBRARY_PATH": "/usr/local/lib",
            "OMP_NUM_THREADS": "1",
            **variables,
        }
        script = _ROOT.format(
            mounts="\n".join(_mount(target, *source) for target, source in {**shared, **volumes}.items()),
            user=USER,
            environment=" ".join(shlex.quote(f"{key}={value}") for key, value in environment.items()),
            command=shlex.quote(f"cd /etc/roundtable && exec {shlex.join(words)}"),
        )
        command = ["nsenter", "-t", str(self._network.pid), "-n", "unshare", "-m", "sh", "-c", script]
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._processes.append(process)
        return process

    def log(self, name: str) -> str:
        """What a container wrote."""
        return (self.folder / f"{name}.log").read_text()

    def close(self) -> None:
        """Ends everything that runs."""
        for process in (*self._processes, self._network):
            process.kill()
            process.wait()
        assert self._network.stdout is not None
        self._network.stdout.close()


def _mount(target: str, source: Path, read_only: bool) -> str:
    place = shlex.quote(target.lstrip("/"))
    make = f"mkdir -p {place}" if source.is_dir() else f"mkdir -p $(dirname {place}); touch {place}"
    bound = f"{make}; mount --bind {shlex.quote(str(source))} {place}"
    return f"{bound}; mount -o remount,ro,bind {place}" if read_only else bound


def volumes_of(service: dict[str, Any], folder: Path, named: Path) -> dict[str, tuple[Path, bool]]:
    """A compose service's volumes: files beside the compose file, and named ones below `named`."""
    volumes = {}
    for volume in service.get("volumes", ()):
        source, target, *mode = volume.split(":")
        place = (folder / source).resolve() if source.startswith(".") else named / source
        if not place.exists():
            place.mkdir(mode=0o700)
            os.chown(place, USER, USER)
        volumes[target] = (place, mode == ["ro"])
    return volumes
