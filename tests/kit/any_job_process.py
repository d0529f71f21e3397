"""A coordinator or a silo's agent in a process of its own, for jobs that are drawn at random: one to kill.

any_job_process.py hub.toml            the coordinator, whose draws follow from the seed in seed.txt
any_job_process.py '{"name": ...}'     a silo, which trains in its own process
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace

from unvarying import unvary


def main() -> int:
    unvary("noise")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    return _silo(json.loads(sys.argv[1])) if sys.argv[1].startswith("{") else _hub(Path(sys.argv[1]))


def _hub(file: Path) -> int:
    from roundtable.server import load_server_config, run_server
    from roundtable.server.jobs.admission import new_job

    seed = file.with_name("seed.txt")
    new_job.secrets = SimpleNamespace(randbits=lambda bits: int(seed.read_text()))  # type: ignore[assignment]
    return run_server(load_server_config(file))


def _silo(values: dict[str, str]) -> int:
    from dataclasses import replace

    from agent_process import InlineTrainer
    from any_job_config import config_of

    from roundtable.client.agent.agent import Agent

    config = config_of((values["coordinator"], Path(values["folder"])), int(values["name"][-1]))
    config = replace(config, relay=values.get("relay", ""))
    asyncio.run(Agent(config, InlineTrainer(config, values["name"])).run())
    return 0


if __name__ == "__main__":
    sys.exit(main())
