"""A forked training process is what a started one would be: tests that fork them prove as much."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forked_starts import ForkedStarts

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")

PROBE = """
import json, os, random, resource, signal, sys
if __name__ == "__main__":
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    command = open("/proc/self/cmdline").read().rstrip(chr(0)).split(chr(0))
    print(json.dumps({
        "command": command, "argv": sys.argv, "path": sys.path, "parent": os.getppid(), "folder": os.getcwd(),
        "environment": dict(os.environ), "umask": os.umask(0), "limit": limit, "safe": sys.flags.safe_path,
        "files": sorted(os.listdir("/proc/self/fd")), "module": "probe" in sys.modules,
        "group": os.getpgrp(), "session": os.getsid(0), "interrupt": repr(signal.getsignal(signal.SIGINT)),
        "pipe": repr(signal.getsignal(signal.SIGPIPE)), "cores": sorted(os.sched_getaffinity(0)),
        "encodings": [each.encoding for each in (sys.stdin, sys.stdout, sys.stderr)],
    }), flush=True)
    for line in sys.stdin:
        print("heard", line.strip(), file=sys.stderr, flush=True)
        if line == "fail\\n":
            raise ValueError("this")
        if line == "draw\\n":
            print(random.random(), flush=True)
    sys.exit(7)
"""
DYING = """
import subprocess, sys
from forked_starts import ForkedStarts
starts = ForkedStarts("mortal")
with starts.in_place():
    for _ in range(3):
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        process = subprocess.Popen([sys.executable, "-P", "-m", "mortal"], **pipes)
        process.stdout.readline()
        starts.wait()
assert starts.forked == 1
print(process.pid, flush=True)
sys.stdin.read()
"""
MORTAL = """
import os, sys
from roundtable.core.machine.process_facts import die_with_parent
if __name__ == "__main__":
    die_with_parent(os.getppid())
    print("here", flush=True)
    os.read(os.pipe()[0], 1)
"""


@pytest.fixture
def starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkedStarts]:
    """Of a module that tells what it is."""
    (tmp_path / "probe.py").write_text(PROBE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made = ForkedStarts("probe")
    with made.in_place():
        yield made
    made.close()


def begin(folder: Path, **changes: Any) -> subprocess.Popen[bytes]:
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, "-P", "-m", "probe", "one", "two words"]
    return subprocess.Popen(command, **{**pipes, "cwd": folder, **changes})


def end(process: subprocess.Popen[bytes], said: bytes = b"") -> tuple[dict[str, Any], list[bytes], int]:
    out, err = process.communicate(said, timeout=60)
    return json.loads(out.splitlines()[0]), err.splitlines(), process.returncode


def test_a_fork_is_what_a_start_would_be(starts: ForkedStarts, tmp_path: Path) -> None:
    (folder := tmp_path / "silo").mkdir()
    environment = {**os.environ, "PYTEST_CURRENT_TEST": "another"}
    before = os.umask(0o027)
    try:
        told, again = (end(begin(folder, env=environment), b"something\n") for _ in range(2))
        assert told == again
        starts.wait()
        assert starts.forked == 0
        forked = begin(folder, env=environment)
    finally:
        os.umask(before)
    assert starts.forked == 1
    assert end(forked, b"something\n") == told
    assert told[0]["parent"] == os.getpid()
    assert told[0]["umask"] == 0o027
    assert told[1:] == ([b"heard something"], 7)


def test_its_end_is_its_own(starts: ForkedStarts, tmp_path: Path) -> None:
    for _ in range(2):
        end(begin(tmp_path))
    starts.wait()
    killed, failed, *drawn = (begin(tmp_path) for _ in range(4))
    killed.kill()
    assert killed.wait(60) == -signal.SIGKILL
    _, words, status = end(failed, b"fail\n")
    assert (words[-1], status) == (b"ValueError: this", 1)
    draws = {each.communicate(b"draw\n", timeout=60)[0].splitlines()[1] for each in drawn}
    assert len(draws) == 2, "each has chance of its own"
    assert starts.forked == 4


def test_whatever_is_unlike_an_agent_s_start_is_started(starts: ForkedStarts, tmp_path: Path) -> None:
    for _ in range(2):
        end(begin(tmp_path))
    starts.wait()
    end(begin(tmp_path, env={**os.environ, "CUDA_VISIBLE_DEVICES": "3"}))
    end(begin(tmp_path, start_new_session=True))
    with starts.as_installed():
        end(begin(tmp_path))
    with pytest.raises(FileNotFoundError):
        begin(tmp_path / "absent")
    assert starts.forked == 0
    end(begin(tmp_path))
    assert starts.forked == 1


def test_it_dies_with_the_process_that_asked_for_it(tmp_path: Path, root: Path) -> None:
    (tmp_path / "mortal.py").write_text(MORTAL)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(root / "tests" / "kit")])}
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    parent = subprocess.Popen([sys.executable, "-c", DYING], env=environment, **pipes)
    assert parent.stdout is not None
    handle = os.pidfd_open(int(parent.stdout.readline()))
    try:
        assert select.select([handle], [], [], 0)[0] == []
        parent.kill()
        parent.communicate()
        assert select.select([handle], [], [], 60)[0] == [handle]
    finally:
        os.close(handle)
