"""systemd as process 1 of namespaces of its own, over this machine's files; what it writes goes with it.

The root is an overlay whose upper half is in memory, so services, users and settings made in it touch nothing
of the machine. Networks are the machine's: a service there answers at 127.0.0.1 here.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

import roundtable

SYSTEMD = Path("/lib/systemd/systemd")
CGROUPS = Path("/sys/fs/cgroup")
# For each thing that systemd is asked to do, on a busy machine.
PATIENCE = 120.0
_BOOT = r"""
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs {scratch}
mkdir {scratch}/upper {scratch}/work {root}
mount -t overlay overlay -o lowerdir=/,upperdir={scratch}/upper,workdir={scratch}/work {root}
mount -t proc proc {root}/proc
mount --rbind /sys {root}/sys
mount --rbind /dev {root}/dev
mount -t tmpfs tmpfs {root}/run
mount -t tmpfs -o mode=1777 tmpfs {root}/tmp
mkdir -p {root}/opt/python {root}/opt/packages {root}/opt/tree
mount --bind {python} {root}/opt/python
mount --bind {packages} {root}/opt/packages
# With their times, by which Python knows that it need not compile them again at each start.
cp -rL --preserve=timestamps {tree}/. {root}/opt/tree
chmod -R a+rX {root}/opt/tree
cat > {root}/usr/local/bin/roundtable <<END
#!/bin/sh
export LD_LIBRARY_PATH=/opt/python/lib PYTHONPATH=/opt/tree:/opt/packages
export PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1
exec /opt/python/bin/{name} -m roundtable "\$@"
END
chmod 755 {root}/usr/local/bin/roundtable
rm -rf {root}/etc/systemd/system
mkdir {root}/etc/systemd/system
printf '[Unit]\nRequires=basic.target\nAfter=basic.target\n' > {root}/etc/systemd/system/tried.target
cd {root}
mkdir before
pivot_root . before
umount -l before
exec env -i container=other PATH=/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/bin \
  {systemd} --system --unit=tried.target
"""


class RealSystemd:
    """A machine of its own, as far as services see; skips where this one cannot give it."""

    def __init__(self, folder: Path) -> None:
        if os.geteuid() or not SYSTEMD.exists() or not shutil.which("nsenter"):
            pytest.skip("a systemd of its own needs root, systemd and nsenter")
        scratch = folder / "systemd"
        scratch.mkdir()
        python = Path(sys.base_prefix)
        words = {
            "scratch": scratch,
            "root": scratch / "root",
            "python": python,
            # Of the libraries: a wheel in an environment of its own is not beside them.
            "packages": Path(grpc.__file__).parents[1],
            "tree": Path(roundtable.__file__).parent.parent,
            "name": f"python{sys.version_info.major}.{sys.version_info.minor}",
            "systemd": SYSTEMD,
        }
        script = _BOOT.format(**{key: shlex.quote(str(value)) for key, value in words.items()})
        self._groups = _own_groups(f"roundtable-{os.getpid()}")
        enter = "".join(f"echo $$ > {shlex.quote(str(group))}/cgroup.procs\n" for group in self._groups)
        namespaces = "unshare --fork --kill-child --pid --mount --uts --ipc --cgroup"
        self._log = (folder / "systemd.log").open("wb")
        self._outer = subprocess.Popen(
            ["sh", "-ec", f"{enter}exec {namespaces} sh -ec {shlex.quote(script)}"],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        try:
            self.until(lambda: self._outer.poll() is not None or self._state() in ("running", "degraded"))
        except AssertionError:
            self.close()
            raise
        if self._outer.poll() is not None:
            self.close()
            said = (folder / "systemd.log").read_text(errors="replace").strip()
            pytest.skip(f"no namespaces or control groups for a systemd of its own here: {said[-300:]}")

    def run(self, *command: str, code: int | None = 0) -> str:
        """What the command says there; its exit code has to be `code`, None for any."""
        inside = ["nsenter", "--target", str(self._first()), "--all", "--", *command]
        environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/bin", "HOME": "/"}
        done = subprocess.run(
            inside, capture_output=True, text=True, env=environment, timeout=PATIENCE, check=False
        )
        assert code is None or done.returncode == code, (command, done.returncode, done.stdout, done.stderr)
        return done.stdout + done.stderr

    def write(self, place: str, text: str, owner: str = "root") -> None:
        """Writes a file there."""
        inside = ["nsenter", "--target", str(self._first()), "--all", "--"]
        script = f"mkdir -p $(dirname {place}) && cat > {place} && chown {owner} {place}"
        subprocess.run([*inside, "sh", "-ec", script], input=text, text=True, check=True)

    def copy(self, folder: Path, place: str, owner: str) -> None:
        """Copies a folder of this machine there."""
        for file in sorted(folder.iterdir()):
            self.write(f"{place}/{file.name}", file.read_text(), owner)
        self.run("chown", "-R", owner, place)
        self.run("sh", "-c", f"chmod 700 {place} && chmod 600 {place}/*")

    def shows(self, unit: str, name: str) -> str:
        """A property of a unit."""
        return self.run("systemctl", "show", "--value", "--property", name, unit).strip()

    def until(self, condition: Callable[[], object]) -> None:
        """Asks again until it holds; systemd tells of a unit's properties only who asks."""
        patience = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < patience, "systemd has not come so far"
            time.sleep(0.1)

    def close(self) -> None:
        """Ends it with all that runs in it."""
        if self._outer.poll() is None:
            first = self._first()
            os.kill(first or self._outer.pid, signal.SIGKILL)
            self._outer.wait(60)
        self._log.close()
        for group in self._groups:
            for folder, _, _ in os.walk(group, topdown=False):
                os.rmdir(folder)

    def _first(self) -> int:
        """Process 1 of the namespaces, by the number that it has here; 0 before there is one."""
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children").read_text().split()
        return int(children[0]) if children else 0

    def _state(self) -> str:
        first = self._first()
        if not first or "systemd" not in os.readlink(f"/proc/{first}/exe"):
            return ""
        return self.run("systemctl", "is-system-running", code=None).strip()


def _own_groups(name: str) -> list[Path]:
    """A control group in each hierarchy in which systemd keeps its own; skips where none can be made."""
    hierarchies = [CGROUPS / "systemd", CGROUPS / "unified"] if (CGROUPS / "systemd").exists() else [CGROUPS]
    made = []
    try:
        for hierarchy in hierarchies:
            (hierarchy / name).mkdir()
            made.append(hierarchy / name)
    except OSError as error:
        for group in made:
            group.rmdir()
        pytest.skip(f"a systemd of its own needs a control group of its own: {error}")
    return made
