"""The silo's side: local training, and the agent that takes part in rounds.

Names are loaded when they are first used: training needs no network code, and a training process
starts sooner without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from roundtable.core.allocator import importing

if TYPE_CHECKING:
    from roundtable.client.agent.agent import Agent, run_agent
    from roundtable.client.agent.connection import Refused
    from roundtable.client.failures import WorkFailed
    from roundtable.client.policy.config import AgentConfig, load_agent_config
    from roundtable.client.trainer import StepWork, TrainedUpdate, Trainer
    from roundtable.client.training.evaluation import evaluate
    from roundtable.client.training.local_training import split_data, train
    from roundtable.client.training.local_work import Execution, LocalUpdate, LocalWork
    from roundtable.client.worker.script_trainer import Round

__all__ = [
    "Agent",
    "AgentConfig",
    "Execution",
    "LocalUpdate",
    "LocalWork",
    "Refused",
    "Round",
    "StepWork",
    "TrainedUpdate",
    "Trainer",
    "WorkFailed",
    "evaluate",
    "load_agent_config",
    "run_agent",
    "split_data",
    "train",
]

_HOMES = {
    "Agent": "agent.agent",
    "AgentConfig": "policy.config",
    "Execution": "training.local_work",
    "LocalUpdate": "training.local_work",
    "LocalWork": "training.local_work",
    "Refused": "agent.connection",
    "Round": "worker.script_trainer",
    "TrainedUpdate": "trainer",
    "Trainer": "trainer",
    "StepWork": "trainer",
    "WorkFailed": "failures",
    "evaluate": "training.evaluation",
    "load_agent_config": "policy.config",
    "run_agent": "agent.agent",
    "split_data": "training.local_training",
    "train": "training.local_training",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with importing():
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
