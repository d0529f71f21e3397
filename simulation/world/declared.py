"""What simulated clients declare and have, as silos do: labels, capacity, their record over other jobs.

All of it follows from the job's seed and the client's number, or from the trace. What clients declare of
their data is read from the data themselves, when a strategy first looks at it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from roundtable.client.training.batches import as_tensors, count_examples
from roundtable.core.config import JobConfig
from roundtable.core.errors import ConfigError, RoundtableError, TaskError
from roundtable.core.job_tables.queue_table import covers
from roundtable.core.seeds import numpy_generator
from roundtable.engine.clients import ClientInfo, declared_examples
from roundtable.simulation.world.config import Choice, amount_of, capacity_table, metadata_table
from roundtable.simulation.world.devices import Devices

ABOUT_DATA = ("examples", "labels")
_MOST_CHARACTERS = 500
_AMOUNTS = ("gpus", "memory", "disk")

Data = Callable[[int], tuple[Any, Any]]
"""The training and the test data of a client by its number."""


class _Drawn:
    """One value a client, drawn with the shares that a table states."""

    def __init__(self, choice: Choice, count: int, generator: np.random.Generator) -> None:
        self._values = tuple(choice)
        shares = np.array([choice[value] for value in self._values])
        many = len(self._values) > 1
        codes = generator.choice(len(shares), count, p=shares / shares.sum()) if many else None
        self._codes = None if codes is None else codes.astype(np.int32)

    def __getitem__(self, index: int) -> str:
        return self._values[0 if self._codes is None else int(self._codes[index])]


class Declared:
    """What each of a job's simulated clients declares, and whether the job asks it."""

    def __init__(self, job: JobConfig, devices: Devices, data: Data) -> None:
        """Raises ConfigError for tables without sense, and for a job that no coordinator with such silos
        would begin, or whose strategy looks at what no client declares."""
        count = job.simulation.clients
        self.devices = devices
        self._job = job
        self._data = data
        self._metadata = {
            key: _Drawn(choice, count, numpy_generator(job.seed, "metadata", key))
            for key, choice in metadata_table(job).items()
        }
        self._capacity = {
            name: _Drawn(choice, count, numpy_generator(job.seed, "capacity", name))
            for name, choice in capacity_table(job).items()
        }
        self._told: dict[int, Mapping[str, str]] = {}
        self.keys = {*self._metadata, *devices.traced_metadata, *job.simulation.declare}
        self._resources = {*self._capacity, *(name for name in _AMOUNTS if devices.traces(name))}
        self._check(count)

    def info(self, index: int, name: str) -> ClientInfo:
        """What the engine may know of a client before it was asked for anything."""
        metadata = self.metadata(index)
        traced = self.devices.traced
        link = {"link": self.devices.link(index)} if self.devices.upload_takes_time else {}
        return ClientInfo(
            name,
            metadata,
            declared_examples(metadata),
            None if self.suits(index) else "unsuited",
            selected=int(traced("selected", index) or 0),
            completed=int(traced("completed", index) or 0),
            **link,
        )

    def metadata(self, index: int) -> Mapping[str, str]:
        """What the client declares."""
        return {**self._stated(index), **self._of_data(index)}

    def suits(self, index: int) -> bool:
        """Whether the client has what `[resources]` asks for, as far as the simulation states it."""
        wish = self._job.resources
        if not (self._resources or self.keys):
            return True
        labels = {key: value for key, value in wish.labels.items() if key in self.keys}
        has = {name: amount for name in _AMOUNTS if (amount := self.amount(name, index)) is not None}
        # Only a label that is about the data makes these be loaded.
        metadata = self.metadata(index) if {*labels} & {*ABOUT_DATA} else self._stated(index)
        return wish.model_copy(update={"labels": labels}).suits(metadata, has)

    def unsuited(self) -> np.ndarray:
        """Ascending numbers of the clients that are not asked."""
        count, wish = self._job.simulation.clients, self._job.resources
        if not (self.keys & {*wish.labels} or self._resources & {*wish.demand}):
            return np.empty(0, dtype=np.int64)
        return np.array([index for index in range(count) if not self.suits(index)], dtype=np.int64)

    def overlooked(self) -> tuple[str, ...]:
        """What `[resources]` asks for and no simulated client states: it counts as had by all."""
        wish = self._job.resources
        groups = {label for group in wish.at_least for label in group.labels}
        labels = [f"labels.{label}" for label in sorted({*wish.labels, *groups} - self.keys)]
        amounts = [name for name in _AMOUNTS if name in wish.demand and name not in self._resources]
        return tuple(f"resources.{name}" for name in [*amounts, *labels])

    def _stated(self, index: int) -> dict[str, str]:
        drawn = {key: values[index] for key, values in self._metadata.items()}
        traced = {
            key: text
            for key in self.devices.traced_metadata
            if (text := self.devices.traced(f"metadata.{key}", index))
        }
        return drawn | traced

    def _of_data(self, index: int) -> Mapping[str, str]:
        """What it declares of its data; nothing where they cannot be loaded: that fails in its round."""
        if not self._job.simulation.declare:
            return {}
        if index not in self._told:
            try:
                train = self._data(index)[0]
            except RoundtableError:
                train = None
            self._told[index] = {} if train is None else _facts(train, self._job.simulation.declare, index)
        return self._told[index]

    def amount(self, name: str, index: int) -> float | None:
        """GPUs, or bytes of memory or disk, that a client states; None where nobody does."""
        text = self.devices.traced(name, index)
        if text is None and name in self._capacity:
            text = self._capacity[name][index]
        return None if text is None else amount_of(name, text)

    def _check(self, count: int) -> None:
        cohort = self._job.cohort
        if cohort.label is not None and cohort.label not in self.keys:
            about = f', or simulation.declare = ["{cohort.label}"]' if cohort.label in ABOUT_DATA else ""
            raise ConfigError(
                f"cohort.label = {cohort.label!r}: no simulated client declares it; say what they declare in "
                f"simulation.metadata.{cohort.label}{about}, or in a column metadata.{cohort.label} of the "
                "trace",
                key=("cohort", "label"),
            )
        for group in self._job.resources.at_least:
            if {*group.labels} <= self.keys:
                have = sum(covers(group.labels, self.metadata(index)) for index in range(count))
                if have < group.silos:
                    raise ConfigError(
                        f"resources.at_least asks for {group.silos} clients with {dict(group.labels)}, and "
                        f"{have} of {count} simulated ones declare that: the job would never begin"
                    )


def _facts(train: Any, declare: tuple[str, ...], index: int) -> dict[str, str]:
    found: dict[str, str] = {}
    if "examples" in declare and (count := count_examples(train)) is not None:
        found["examples"] = str(count)
    if "labels" in declare:
        found["labels"] = label_counts(train, f"client {index}")
    return found


def label_counts(train: Any, whose: str) -> str:
    """How many examples of each label there are, as silos declare it: "0:120 1:34". The labels are the last
    of the data's tensors. Raises ConfigError where that holds no labels, or too many to be declared."""
    try:
        tensors = as_tensors(train)
    except TaskError:
        tensors = None
    labels = tensors[-1] if tensors else None
    if labels is None or labels.ndim != 1 or labels.is_floating_point():
        raise ConfigError(
            f'simulation.declare = ["labels"]: the last tensor of the training data of {whose} is no column '
            "of whole numbers; state labels in simulation.metadata or the trace"
        )
    kinds, counts = torch.unique(labels, return_counts=True)
    text = " ".join(f"{kind}:{many}" for kind, many in zip(kinds.tolist(), counts.tolist(), strict=True))
    if len(text) > _MOST_CHARACTERS:
        raise ConfigError(
            f'simulation.declare = ["labels"]: {whose} has {len(kinds)} labels, and what a silo declares has '
            f"at most {_MOST_CHARACTERS} characters"
        )
    return text
