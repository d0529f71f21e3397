"""What replicas that come and go cannot train: where a round would differ from what is stated."""

from __future__ import annotations

from typing import Any

from roundtable.client.training.batches import count_examples
from roundtable.cluster.parallel.meta_init import model_on_meta
from roundtable.cluster.plan.privacy_composition import is_example_level
from roundtable.core.config import JobConfig
from roundtable.core.errors import ConfigError
from roundtable.core.task import Task


def check_replicas(task: Task, job: JobConfig, data: Any, precision: str, optimizer_bits: int) -> None:
    """Raises ConfigError for a job that `no_peers` has a reason against, and for what was not tried."""
    if optimizer_bits == 8:
        raise ConfigError(
            '[cluster] elastic = "replica" and optimizer_bits = 8: a replica that joins takes the state of '
            "another, which was not tried with one in 8 bits; leave one of the two out"
        )
    if precision == "float16":
        raise ConfigError(
            '[cluster] elastic = "replica" and float16: a replica that joins has no scale of the losses; use '
            "bfloat16 or float32"
        )
    if reason := no_peers(task, job, data):
        raise ConfigError(f'[cluster] elastic = "replica": {reason}')


def no_peers(task: Task, job: JobConfig, data: Any) -> str:
    """Why a job cannot be trained by replicas that may be lost in a round; "" where it can."""
    if is_example_level(job):
        return (
            "privacy.level = 'example' accounts for the noise and the sampling of all ranks together, and a "
            "replica that is lost takes its samples with it"
        )
    if count_examples(data) is None:
        return "streamed data are dealt out by lanes for the whole of a round, and replicas come and go in it"
    model = model_on_meta(task)
    saved = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        if name in saved and buffer.is_floating_point():
            return (
                f"the model has a buffer {name!r} that training may change (statistics of a batch), and each "
                "replica would have its own"
            )
    return ""
