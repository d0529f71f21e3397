"""Training on data that the coordinator trusts: what it gives measures the silos' updates (FLTrust)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from roundtable.client.training.batches import as_tensors, count_examples
from roundtable.client.training.local_training import split_data, train
from roundtable.client.training.local_work import LocalWork
from roundtable.core.config import JobConfig
from roundtable.core.errors import TaskError
from roundtable.core.layout import Layout
from roundtable.core.privacy_table import NoPrivacy
from roundtable.core.seeds import torch_generator
from roundtable.core.task import AnyTask, ArrayTask, Site, initial_state

NAME = "coordinator"


class RootData:
    """A task's trusted training data, and training on it as a silo would.

    `most` keeps so many examples, drawn under `seed`; None keeps all. Raises what the task's `data` raises.
    """

    def __init__(self, task: AnyTask, site: Site, most: int | None = None, seed: int = 0) -> None:
        self._task = task
        data, _ = split_data(task, site)
        self._data = data if most is None else _drawn(task, data, most, seed)

    def update(self, job: JobConfig, layout: Layout, vector: Tensor, round: int) -> Tensor:
        """local − global after a round of training from `vector`: float32 [layout.size].

        Nothing of it is private: the job's protection is for what leaves a silo. Raises what
        `roundtable.client.training.local_training.train` raises.
        """
        open_job = job.model_copy(update={"privacy": NoPrivacy()})
        model = initial_state(self._task, job.seed)
        layout.check_frozen(model.state_dict() if isinstance(model, nn.Module) else model)
        return train(self._task, model, self._data, LocalWork(open_job, layout, vector, round, NAME)).delta


def _drawn(task: AnyTask, data: object, most: int, seed: int) -> object:
    """`most` random examples of a data set; all of one that has no more."""
    count = count_examples(data)
    if isinstance(task, ArrayTask) or count is None:
        raise TaskError(
            f"{type(task).__name__}.data() gives data that cannot be drawn from: trusted examples are taken "
            "at random from tensors or a map-style dataset"
        )
    if count <= most:
        return data
    chosen = torch.randperm(count, generator=torch_generator(seed, NAME, "root"))[:most].sort().values
    tensors = as_tensors(data)
    if tensors is None:
        return Subset(data, chosen.tolist())  # type: ignore[arg-type]
    return tuple(tensor[chosen] for tensor in tensors)
