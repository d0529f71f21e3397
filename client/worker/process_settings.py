"""What an agent's file says to its training process."""

from __future__ import annotations

import os
from pathlib import Path

from roundtable.client.policy.config import AgentConfig
from roundtable.client.policy.gpus import shown_gpus
from roundtable.client.worker.executor import Settings
from roundtable.core.foundation.base_model import BASES


def settings_of(config: AgentConfig, client: str, jobs: Path) -> Settings:
    """A training process's settings, as the agent file says them."""
    _, device = shown_gpus(config.policy.max_gpus, config.device, os.environ)
    return Settings(
        client=client,
        folder=str(config.folder),
        jobs=str(jobs),
        device=device,
        threads=config.threads,
        data=dict(config.data),
        epsilon=config.policy.epsilon,
        delta=config.policy.delta,
        memory=config.policy.memory_bytes,
        gpu_memory=config.policy.gpu_memory_bytes,
        generations=config.policy.generations,
        data_of={table.use: table.data for table in config.task_tables.values() if table.data is not None},
    )


def bases_of(config: AgentConfig) -> dict[str, str]:
    """The folders of pretrained models, as the training process is told; for none a place below which
    nothing is."""
    if config.policy.bases is None:
        return {}
    folders = [(config.folder / Path(each).expanduser()).resolve() for each in config.policy.bases]
    return {BASES: os.pathsep.join(map(str, folders)) or os.devnull}
