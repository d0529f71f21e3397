"""Federated learning for organisations that may not pool their data: `import roundtable as rt`.

What is listed in `__all__` is the public face: tasks, jobs, and what code of your own is made of that a job
names (docs/extending.md); a name is loaded when it is first used, so that
`import roundtable` and `roundtable --help` stay quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from roundtable.core.allocator import importing

if TYPE_CHECKING:
    from roundtable.aggregation.optimizers import OptimizerState
    from roundtable.aggregation.registry import RuleResult
    from roundtable.client.adapters.flower_app import flower_app
    from roundtable.client.adapters.flower_client import flower_client
    from roundtable.client.adapters.nvflare_script import nvflare_script
    from roundtable.client.analysis_task import OwnAnalysis
    from roundtable.client.join import join
    from roundtable.client.streams.tar_shards import TarShards
    from roundtable.core import measures as metrics
    from roundtable.core.algorithms.contract import (
        AlgorithmPlace,
        ClientAlgorithm,
        ClientRound,
        Composition,
        Moved,
        Sent,
        ServerAlgorithm,
        ServerRound,
    )
    from roundtable.core.algorithms.gradient_work import GradientWork
    from roundtable.core.algorithms.round_context import Context
    from roundtable.core.algorithms.step import LocalStep
    from roundtable.core.algorithms.table import AlgorithmTable
    from roundtable.core.analyses.own_question import OwnForm, OwnSum
    from roundtable.core.config import JobConfig, load_job
    from roundtable.core.encodings.codec import Codec
    from roundtable.core.encodings.encoding import Traits
    from roundtable.core.errors import EncodingError, RoundtableError
    from roundtable.core.foundation.huggingface_classifier import HuggingFaceClassifier
    from roundtable.core.foundation.huggingface_task import HuggingFaceTask
    from roundtable.core.foundation.published import load_adapter
    from roundtable.core.task import ArrayTask, Site, Task, load_task
    from roundtable.engine.foreign_selection import SelectionStrategy
    from roundtable.engine.selection import Candidate
    from roundtable.loading import load_model
    from roundtable.operator import OperatorClient
    from roundtable.simulation import simulate
    from roundtable.surveys import SurveyAnswers, analyse, load_survey

    __version__: str

__all__ = [
    "AlgorithmPlace",
    "AlgorithmTable",
    "ArrayTask",
    "Candidate",
    "ClientAlgorithm",
    "ClientRound",
    "Codec",
    "Composition",
    "Context",
    "EncodingError",
    "GradientWork",
    "HuggingFaceClassifier",
    "HuggingFaceTask",
    "JobConfig",
    "LocalStep",
    "Moved",
    "OperatorClient",
    "OptimizerState",
    "OwnAnalysis",
    "OwnForm",
    "OwnSum",
    "RoundtableError",
    "RuleResult",
    "SelectionStrategy",
    "Sent",
    "ServerAlgorithm",
    "ServerRound",
    "Site",
    "SurveyAnswers",
    "TarShards",
    "Task",
    "Traits",
    "__version__",
    "analyse",
    "flower_app",
    "flower_client",
    "join",
    "load_adapter",
    "load_job",
    "load_model",
    "load_survey",
    "load_task",
    "metrics",
    "nvflare_script",
    "simulate",
]

_HOMES = {
    "AlgorithmPlace": "roundtable.core.algorithms.contract",
    "AlgorithmTable": "roundtable.core.algorithms.table",
    "ArrayTask": "roundtable.core.task",
    "Candidate": "roundtable.engine.selection",
    "ClientAlgorithm": "roundtable.core.algorithms.contract",
    "ClientRound": "roundtable.core.algorithms.contract",
    "Codec": "roundtable.core.encodings.codec",
    "Composition": "roundtable.core.algorithms.contract",
    "Context": "roundtable.core.algorithms.round_context",
    "EncodingError": "roundtable.core.errors",
    "GradientWork": "roundtable.core.algorithms.gradient_work",
    "HuggingFaceClassifier": "roundtable.core.foundation.huggingface_classifier",
    "HuggingFaceTask": "roundtable.core.foundation.huggingface_task",
    "JobConfig": "roundtable.core.config",
    "LocalStep": "roundtable.core.algorithms.step",
    "Moved": "roundtable.core.algorithms.contract",
    "OperatorClient": "roundtable.operator",
    "OptimizerState": "roundtable.aggregation.optimizers",
    "OwnAnalysis": "roundtable.client.analysis_task",
    "OwnForm": "roundtable.core.analyses.own_question",
    "OwnSum": "roundtable.core.analyses.own_question",
    "RoundtableError": "roundtable.core.errors",
    "RuleResult": "roundtable.aggregation.registry",
    "SelectionStrategy": "roundtable.engine.foreign_selection",
    "Sent": "roundtable.core.algorithms.contract",
    "ServerAlgorithm": "roundtable.core.algorithms.contract",
    "ServerRound": "roundtable.core.algorithms.contract",
    "Site": "roundtable.core.task",
    "SurveyAnswers": "roundtable.surveys",
    "TarShards": "roundtable.client.streams.tar_shards",
    "Task": "roundtable.core.task",
    "Traits": "roundtable.core.encodings.encoding",
    "analyse": "roundtable.surveys",
    "flower_app": "roundtable.client.adapters.flower_app",
    "flower_client": "roundtable.client.adapters.flower_client",
    "join": "roundtable.client.join",
    "load_adapter": "roundtable.core.foundation.published",
    "load_job": "roundtable.core.config",
    "load_model": "roundtable.loading",
    "load_survey": "roundtable.surveys",
    "load_task": "roundtable.core.task",
    "nvflare_script": "roundtable.client.adapters.nvflare_script",
    "simulate": "roundtable.simulation",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("roundtable.core.evidence.release").release().version
    if name == "metrics":
        return import_module("roundtable.core.measures")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with importing():
        value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
