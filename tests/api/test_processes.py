"""Child processes are watched, and never left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from roundtable.child_processes import Child, Children
from roundtable.core.errors import ResourceError


def test_a_child_that_ends_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        child = children.start("doctor", ["nonsense"])
        child.process.wait()
        with pytest.raises(
            ResourceError, match=r"(?s)'doctor' ended with code 2.*No such command 'nonsense'"
        ):
            children.check()


def test_ctrl_c_while_stopping_still_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Children(tmp_path) as children:
        child = children.start("demo", ["completion", "--help"])
        waited: list[float] = []
        wait = child.process.wait

        def interrupted(timeout: float | None = None) -> int:
            waited.append(timeout or 0.0)
            if len(waited) == 1:
                raise KeyboardInterrupt
            return wait(timeout)

        monkeypatch.setattr(child.process, "wait", interrupted)
    assert len(waited) == 2
    assert child.process.returncode is not None


def test_the_tail_of_a_log_is_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "kept.log"
    log.write_text("\n".join(str(number) for number in range(100)))
    with Children(tmp_path) as children:
        child = children.start("x", ["--help"])
        child.process.wait()
        assert Child("y", child.process, log).tail().splitlines()[-1] == "99"


def test_ctrl_c_while_commands_are_imported_shows_no_traceback() -> None:
    program = (
        "import sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'roundtable.cli.analyse':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "import roundtable.cli.main\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")
