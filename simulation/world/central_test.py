"""A test set of the server's own, in a simulation: what each round's model makes of it, beside the "
"clients'."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from roundtable.client.training.evaluation import evaluate
from roundtable.core.errors import ConfigError, RoundtableError, TaskError
from roundtable.core.observability.metric_sums import worked_out
from roundtable.core.plugins.doors import described
from roundtable.core.task import Site, Task, initial_state
from roundtable.core.tensor_spec import DTYPES
from roundtable.simulation.backend import Work, World

SERVER = "server"


class CentralTest:
    """Measures models on the data of the task's `test_data`; nothing where it has none.

    Raises ConfigError where a job asks for what is not there, or where tensors that stay at the clients are a
    part of the model: it would be measured with values that nobody trained.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._every = world.job.simulation.test_every
        self._data = self._load() if self._every else None
        if self._data is None:
            if world.job.stop.central:
                raise ConfigError(
                    f"stop.metric = {world.job.stop.metric!r} is measured on the server's test data, and "
                    "there are none: give the task a method test_data(self, site), and leave "
                    "simulation.test_every above 0",
                    key=("stop", "metric"),
                )
            return
        staying = (spec for spec in world.layout.tensors if spec.rule == "local")
        local = [spec.name for spec in staying if DTYPES[spec.dtype].is_floating_point]
        if local:
            raise ConfigError(
                f"{type(world.task).__name__}.test_data() and the local tensor {local[0]!r}: it stays at "
                "the clients, and the server would measure the model with values that nobody trained; set "
                "simulation.test_every = 0",
                key=("simulation", "test_every"),
            )
        self._model = initial_state(world.task, world.job.seed)

    def measure(self, round: int, vector: Tensor) -> dict[str, tuple[float, int]]:
        """(sum, count) of each metric of the model that `round` has made; empty where it is not due.

        Raises TaskError for what the task raises.
        """
        job, task = self._world.job, self._world.task
        due = self._data is not None and (round % self._every == 0 or round == job.rounds)
        if not due:
            return {}
        work = self._world.local_work(round, vector, Work(SERVER, 0))
        try:
            sums = evaluate(
                task,
                self._model,
                self._data,
                self._world.layout,
                vector,
                batch_size=job.evaluation_batch,
                context=work.evaluation_context(torch.device("cpu")),
            )
        except RoundtableError:
            raise
        except Exception as error:
            raise TaskError(f"round {round}: the server's test data: {described(error)}") from error
        return worked_out(sums, job.metrics)[0]

    def _load(self) -> Any:
        make = getattr(self._world.task, "test_data", None)
        if make is None or getattr(type(self._world.task), "test_data", None) is Task.test_data:
            return None
        options: Mapping[str, Any] = self._world.job.simulation.data
        site = Site(SERVER, options=options, standardise=self._world.job.standardise)
        try:
            data = make(site)
            if data is not None:
                site.check_asked(f"{type(self._world.task).__name__}.test_data()")
            return data
        except RoundtableError:
            raise
        except Exception as error:
            raise TaskError(
                f"{type(self._world.task).__name__}.test_data() failed: {described(error)}"
            ) from error
