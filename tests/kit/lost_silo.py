"""A silo's agent in a process of its own, whose task ends the agent, the launcher and all ranks at once."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from cluster_silo import TASK, Silo, watched

TABLE = {"timeout": 20.0, "checkpoint_steps": 2, "keep": 8}
CUT = """
                if trouble == "power cut":
                    parent = lambda pid: int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
                    launcher = os.getppid()
                    ranks = [int(each.name) for each in pathlib.Path("/proc").iterdir() if each.name.isdigit()
                             and each.name != str(os.getpid()) and parent(each.name) == launcher]
                    for pid in (parent(launcher), launcher, *ranks, os.getpid()):
                        os.kill(pid, signal.SIGKILL)
                if trouble == "kill":
"""
CODE = TASK.replace('\n                if trouble == "kill":\n', CUT)


async def _train(folder: Path) -> None:
    silo = Silo(folder, code=CODE, table=TABLE, trouble="power cut", call=22)
    async with silo.trainer() as trainer:
        await trainer.train(silo.work(), watched([]))


if __name__ == "__main__":
    asyncio.run(_train(Path(sys.argv[1])))
