"""The process that all ranks of a machine are forked from: none outlives it, and it is made anew."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from roundtable.client.policy.cluster_table import ClusterTable
from roundtable.cluster.agent.launcher import Launcher
from roundtable.cluster.plan.resources import Resources

TWO = Resources(1, 2, 1 << 30, "cpu")


def alive(session: int) -> list[int]:
    """The processes of a session that have not ended, as the kernel tells them."""
    found = []
    for each in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, of = each.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(of) == session and state != "Z":
            found.append(int(each.parent.name))
    return sorted(found)


async def ranks_of(launcher: Launcher, ranks: int) -> list[int]:
    """Its process, and then so many ranks of it once they are there."""
    async with asyncio.timeout(120):
        while (forker := launcher._forker) is None or len(alive(forker.process.pid)) < 1 + ranks:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return alive(forker.process.pid)


@pytest.mark.slow
async def test_a_launcher_that_is_killed_takes_its_ranks_along_and_is_made_anew(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, tmp_path, ClusterTable())
    for loads, number in enumerate([signal.SIGKILL, signal.SIGTERM], 1):
        # No agent listens in the folder: the ranks wait for one.
        one, other = await launcher.start(TWO, [0, 1]), await launcher.start(TWO, [2, 3])
        process, *_ = await ranks_of(launcher, 4)
        os.kill(process, number)
        async with asyncio.timeout(60):
            await one.ended()
            await other.ended()
            while alive(process):  # noqa: ASYNC110 - nothing tells it
                await asyncio.sleep(0.01)
        assert f"the launcher of the ranks ended with status {-number}" in one.last_failure()
        assert launcher.loads == loads
    group = await launcher.start(TWO, [0, 1])
    process, *_ = await ranks_of(launcher, 2)
    await group.end()
    assert alive(process) == [process], "it outlives its groups"
    group = await launcher.start(TWO, [0, 1])
    _, _, rank = await ranks_of(launcher, 2)
    os.kill(rank, signal.SIGKILL)
    async with asyncio.timeout(60):
        await group.ended()
    assert "was ended by SIGKILL" in group.last_failure()
    # A launcher that stands still ends no group: it is ended itself.
    group = await launcher.start(TWO, [0, 1])
    await ranks_of(launcher, 2)
    os.kill(process, signal.SIGSTOP)
    await group.end()
    assert not alive(process)
    await launcher.close()


@pytest.mark.slow
async def test_a_launcher_that_cannot_load_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('a torch that is broken')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    launcher = Launcher(tmp_path, tmp_path, ClusterTable())
    group = await launcher.start(TWO, [0, 1])
    await group.ended()
    assert "a torch that is broken" in group.last_failure()
    await launcher.close()


async def test_a_group_that_is_ended_before_the_launcher_has_loaded_is_never_started(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, tmp_path, ClusterTable())
    group = await launcher.start(TWO, [0, 1])
    await group.end()
    assert "ended before it was started" in group.last_failure()
    forker = launcher._forker
    assert forker is not None
    await launcher.close()
    assert not alive(forker.process.pid)


@pytest.mark.slow
def test_what_ranks_are_forked_from_runs_one_thread_and_has_begun_nothing_of_cuda() -> None:
    code = (
        "import roundtable.cluster.train.rank, torch, os\n"
        "print(len(os.listdir('/proc/self/task')), torch.cuda.is_initialized(), "
        "torch.distributed.is_initialized())"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    said = subprocess.run([sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True)
    assert said.stdout.split() == ["1", "False", "False"], said.stderr
