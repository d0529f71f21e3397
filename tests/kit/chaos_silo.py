"""A silo's agent for chaos: real training, and in masked rounds a vector that follows from round and name.

What a masked round adds up nobody sees; so that its model can be made again whatever was lost before, its
updates do not depend on the model.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from unvarying import follow_clock, unvary

EXAMPLES = 10
LOSS = 1.0


def main() -> None:
    values = json.loads(sys.argv[1])
    follow_clock(Path(values["folder"]) / f"{values['name']}.clock")
    import logging

    from agent_process import InlineTrainer
    from chaos_vectors import delta_of

    from roundtable.client.agent.agent import Agent
    from roundtable.client.policy.config import AgentConfig
    from roundtable.client.trainer import ProgressListener, StepWork, TrainedUpdate, write_update
    from roundtable.core.models import open_model
    from roundtable.core.privacy_table import masking_of

    class MixedTrainer(InlineTrainer):
        async def train(self, work: StepWork, progress: ProgressListener) -> TrainedUpdate:
            if masking_of(work.job.privacy) is None:
                return await super().train(work, progress)
            columns = open_model(work.model).layout.size
            delta = delta_of(work.step.round, values["name"], columns)
            digest, size = write_update(work.output, delta, work.job.transfer.up)
            return TrainedUpdate(digest, size, EXAMPLES, {"loss": (LOSS * EXAMPLES, EXAMPLES)})

    unvary(values["name"])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    config = AgentConfig(
        coordinator=values["coordinator"],
        standbys=tuple(values["standbys"]),
        credentials=Path(values["credentials"]),
        state=Path(values["state"]),
        tasks={"toy": "toy.py:Toy"},
        device="cpu",
        threads=1,
        folder=Path(values["folder"]),
    )
    asyncio.run(Agent(config, MixedTrainer(config, values["name"])).run())


if __name__ == "__main__":
    main()
