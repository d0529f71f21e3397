"""What the coordinator trains on data of its own: the task's code, brought into the service from outside."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from roundtable.client.training.trusted_data import NAME, RootData
from roundtable.core.config import JobConfig
from roundtable.core.errors import AggregationError, RoundtableError
from roundtable.core.job_tables.task_table import JobTaskTable
from roundtable.core.layout import Layout
from roundtable.core.task import Site, load_task
from roundtable.server.config import RootTable


class TrustedData:
    """The coordinator's `[root_data]` tables; a task is imported and its data are read when first needed."""

    def __init__(self, tables: Mapping[str, RootTable]) -> None:
        self._tables = tables
        self._loaded: dict[str, tuple[dict[str, Any], RootData]] = {}

    def offers(self, task: JobTaskTable) -> bool:
        """Whether there is a table for a job's task, by its plain name, that lets it set its parameters."""
        table = self._tables.get(self._name_of(task.name))
        return table is not None and set(task.parameters) <= set(table.parameters)

    def update(self, job: JobConfig, layout: Layout, vector: Tensor, round: int) -> Tensor:
        """local − global after a round of training from `vector`: float32 [layout.size].

        Raises AggregationError where the task fails, whatever it raises.
        """
        try:
            return self._data(job.task).update(job, layout, vector, round)
        except RoundtableError as error:
            raise AggregationError(f"training on the coordinator's trusted data failed: {error}") from error
        except Exception as error:
            raise AggregationError(
                f"training on the coordinator's trusted data failed: {type(error).__name__}: {error}"
            ) from error

    def _name_of(self, task: str) -> str:
        return task if task in self._tables else Path(task.partition(":")[0]).stem

    def _data(self, task: JobTaskTable) -> RootData:
        """The task's data, read again where a job has other parameters than the last."""
        name, parameters = self._name_of(task.name), task.parameters
        made_with, data = self._loaded.get(name, (None, None))
        if data is None or made_with != parameters:
            table = self._tables[name]
            made = load_task(table.task, parameters=parameters)
            data = RootData(made, Site(NAME, options=table.data))
            self._loaded[name] = parameters, data
        return data
