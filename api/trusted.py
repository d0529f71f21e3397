"""What the coordinator trains on data of its own: the task's code, brought into the service from outside."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from roundtable.client.training.trusted_data import NAME, RootData
from roundtable.core.config import JobConfig
from roundtable.core.errors import AggregationError, RoundtableError
from roundtable.core.layout import Layout
from roundtable.core.task import Site, load_task
from roundtable.server.config import RootTable


class TrustedData:
    """The coordinator's `[root_data]` tables; a task is imported and its data are read when first needed."""

    def __init__(self, tables: Mapping[str, RootTable]) -> None:
        self._tables = tables
        self._loaded: dict[str, RootData] = {}

    def offers(self, task: str) -> bool:
        """Whether there is a table for a job's task, by its plain name."""
        return self._name_of(task) in self._tables

    def update(self, job: JobConfig, layout: Layout, vector: Tensor, round: int) -> Tensor:
        """local − global after a round of training from `vector`: float32 [layout.size].

        Raises AggregationError where the task fails, whatever it raises.
        """
        try:
            return self._data(self._name_of(job.task)).update(job, layout, vector, round)
        except RoundtableError as error:
            raise AggregationError(f"training on the coordinator's trusted data failed: {error}") from error
        except Exception as error:
            raise AggregationError(
                f"training on the coordinator's trusted data failed: {type(error).__name__}: {error}"
            ) from error

    def _name_of(self, task: str) -> str:
        return task if task in self._tables else Path(task.partition(":")[0]).stem

    def _data(self, name: str) -> RootData:
        if name not in self._loaded:
            table = self._tables[name]
            self._loaded[name] = RootData(load_task(table.task), Site(NAME, options=table.data))
        return self._loaded[name]
