"""The model that a job starts from: the task's own, under the job's seed, as an artifact."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from roundtable.core.config import JobConfig
from roundtable.core.errors import TaskError
from roundtable.core.layout import Layout
from roundtable.core.models import Model
from roundtable.core.task import AnyTask, initial_state


def initial_model(job: JobConfig, task: AnyTask) -> Model:
    """The same bytes wherever it is made: by `job submit`, in a simulation, at a silo.

    Raises TaskError if the task's model has no tensor that travels, LayoutError for a tensor that
    cannot be carried.
    """
    made = initial_state(task, job.seed)
    layout = Layout.of(made, job.model.rules())
    if layout.size == 0:
        raise TaskError(
            f"task {job.task!r}: no tensor of its model travels; check [model] local and drop in the job file"
        )
    state: Mapping[str, Tensor] = made.state_dict() if isinstance(made, nn.Module) else made
    local = {
        spec.name: state[spec.name].detach()
        for spec in layout.tensors
        if spec.rule == "local" and spec.alias_of is None
    }
    metadata = {"job": job.title, "task": job.task, "round": "0"}
    return Model(layout, layout.flatten(made), local, metadata)
