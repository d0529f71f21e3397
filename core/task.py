"""What a data scientist writes: the model, the data of a silo, the loss, the metrics, the optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from roundtable.core.algorithms.round_context import Context
from roundtable.core.errors import ConfigError, TaskError
from roundtable.core.paths import AnyPath
from roundtable.core.plugins.calls import check_parameters, place_of
from roundtable.core.plugins.code_hash import hash_of_code
from roundtable.core.plugins.doors import described, import_file, import_module
from roundtable.core.seeds import derive_seed, isolated_randomness
from roundtable.core.tables.silo_tables import SiloTables
from roundtable.core.tables.standardise_table import StandardiseTable
from roundtable.core.tables.table_reading import DataTable

Batch = Any
Dataset = Any
Partition = Callable[[np.ndarray, int, int], np.ndarray]


@dataclass(frozen=True)
class Site:
    """Where a task runs: a silo, or one simulated client of many.

    `options` is the `[data]` table of the silo's agent file (paths, credentials' locations: what only
    the silo knows), or the job's `[simulation.data]` when simulated. `index` of `count` is the
    client's number in a simulation; a real silo is 0 of 1. `standardise` is the job's, and `asked` the
    tables that the task has asked for.
    """

    name: str
    index: int = 0
    count: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    partition: Partition | None = None
    standardise: StandardiseTable | None = None
    asked: set[str] = field(default_factory=set, init=False, compare=False, repr=False)

    @property
    def tables(self) -> SiloTables:
        """The tables that `options` describe, as they are."""
        return SiloTables(self.options, self.index)

    def table(self, name: str) -> DataTable:
        """A table that the silo's [data.NAME] describes, all its columns: float64, NaN where a value is
        missing, a category as the place of its value.

        Columns that the job standardises are there as (x - mean) / sd, the same figures at every site.
        Raises TaskError for a table that is not described, or whose values are not as described.
        """
        self.asked.add(name)
        tables, wanted = self.tables, self.standardise
        if wanted is None or wanted.table != name:
            return tables.read(name)
        if not wanted.complete:
            raise TaskError("the job lacks figures of [standardise], so no site can standardise alike")
        return wanted.applied(tables.read(name, {**tables[name].columns, **wanted.described}))

    def check_asked(self, task: str) -> None:
        """TaskError where the job standardises a table that the task has not asked for: it would train on
        other columns than the job says."""
        if self.standardise is not None and self.standardise.table not in self.asked:
            name = self.standardise.table
            raise TaskError(
                f"the job standardises the table {name!r}, and {task} reads its data without "
                f"site.table({name!r}): read it so, or leave [standardise] out"
            )

    def shard(self, labels: Sequence[int] | np.ndarray | Tensor) -> np.ndarray:
        """Row numbers of this site's share of a data set with these labels.

        At a silo all of its data is its own. In a simulation the job's partition says who has what;
        the split is the same for the same seed.
        """
        values = np.asarray(labels)
        if self.partition is None:
            return np.arange(len(values))
        return self.partition(values, self.index, self.count)


class Task:
    """Subclass this, or write plain functions with these names on any object.

    `loss`, `metrics` and `optimizer` may have one more parameter, `context`, and are then told the round, the
    job, the site, the number of steps, the device and a stream of random numbers (`Context`).

    `model` and `data` and `loss` are needed; `metrics` and `optimizer` are optional. The same task
    runs in a simulation, at a silo, and over a silo's cluster.

    `example_tokens`: how many tokens each example of the training data has, all as many; then rounds tell
    tokens a second and bytes a token.
    """

    example_tokens: int | None = None

    def model(self) -> nn.Module:
        """A new model; called under the job's seed, so that every party starts from the same weights."""
        raise NotImplementedError(f"{type(self).__name__} has no model()")

    def data(self, site: Site) -> tuple[Dataset, Dataset]:
        """(train, test) of this silo: tuples of tensors, map-style datasets or streams (docs/data.md); test
        may be empty or None."""
        raise NotImplementedError(f"{type(self).__name__} has no data()")

    def test_data(self, site: Site) -> Dataset | None:
        """A test set of the server's own, in a form that `data` may give; None for none.

        In simulations each round's model is measured on it, as `central_NAME` beside what clients measure.
        """
        return None

    def client_names(self, count: int) -> Sequence[str] | None:
        """What the `count` clients of a simulation are called in what people read: hospitals, speakers. None
        leaves it to the partition, whose keys may be names, or to their numbers."""
        return None

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Scalar tensor: the mean over the batch."""
        raise NotImplementedError(f"{type(self).__name__} has no loss()")

    def metrics(self, model: nn.Module, batch: Batch) -> Mapping[str, tuple[float | Tensor, int]]:
        """Named (sum, count) pairs, for example `{"accuracy": (correct, total)}`; sums add up over silos."""
        return {}

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer | None:
        """An optimizer of your own; None means SGD as the job's `[algorithm]` table describes it."""
        return None


class ArrayTask:
    """A task for code that is no PyTorch module: weights are a dict of NumPy arrays.

    scikit-learn, JAX or TensorFlow users implement these; federated averaging runs over the arrays.
    """

    def weights(self) -> dict[str, np.ndarray]:
        """The initial weights, the same at every party."""
        raise NotImplementedError(f"{type(self).__name__} has no weights()")

    def data(self, site: Site) -> Any:
        """This silo's data, in whatever form `fit` and `evaluate` take."""
        raise NotImplementedError(f"{type(self).__name__} has no data()")

    def fit(
        self, weights: dict[str, np.ndarray], data: Any, options: Mapping[str, Any]
    ) -> tuple[dict[str, np.ndarray], int, dict[str, float]]:
        """Trains from `weights`; returns (new weights, number of examples, metrics as means)."""
        raise NotImplementedError(f"{type(self).__name__} has no fit()")

    def evaluate(self, weights: dict[str, np.ndarray], data: Any) -> Mapping[str, tuple[float, int]]:
        """Named (sum, count) pairs on the silo's test data."""
        return {}


AnyTask = Task | ArrayTask
CONTEXT = "context"
TOLD = ("loss", "metrics", "optimizer", "fit", "evaluate")
"""Methods that are told where and when they run, if they have a parameter of the name `context`."""
ENTRY_POINTS = "roundtable.tasks"
BUILTIN = {"analysis": "roundtable.client.analysis_task:AnalysisTask"}
"""Tasks that come with this software."""
_ABSENT = object()


def load_task(
    reference: str,
    folder: AnyPath | None = None,
    *,
    parameters: Mapping[str, Any] | None = None,
    trains: bool = True,
) -> AnyTask:
    """The task that `reference` names.

    In order: `file.py:Class` or `file.py` (relative to `folder`), `module:Class`, the name of an
    installed entry point in the group `roundtable.tasks`, and `NAME.py` in `folder`. `parameters` are
    handed to what the reference names, a class or a function that makes the task. `trains` asks for all
    that training needs; without it a task may have nothing but its model, for silos that train with
    scripts of their own. Raises TaskError that says what was looked for, where, and what the import said;
    ConfigError for parameters that do not fit.
    """
    definition = _find(reference, Path.cwd() if folder is None else Path(folder))
    task = make_task(reference, definition, parameters or {})
    check_signatures(task)
    if lacking := [name for name in lacks(task) if trains or name in ("model", "weights")]:
        raise TaskError(f"task {reference!r}: {type(task).__name__} has no {', '.join(lacking)}")
    return task


def hash_of_task(reference: str, folder: Path | None) -> str:
    """BLAKE3 of the code of a task that `load_task` finds by this reference. Raises ConfigError for none."""
    return hash_of_code("task", BUILTIN.get(reference, reference), ENTRY_POINTS, folder)


def make_task(reference: str, definition: Any, parameters: Mapping[str, Any]) -> AnyTask:
    """The task that a class or a function makes of a job's parameters; an object is itself one.

    Raises ConfigError for parameters that do not fit, TaskError where the making fails.
    """
    if not isinstance(definition, type) and not inspect.isfunction(definition):
        if parameters:
            raise ConfigError(
                f"task {reference!r} is an object that is made already, and takes no parameters: name its "
                "class, or a function that makes it",
                key=("task", next(iter(parameters))),
            )
        return definition  # type: ignore[no-any-return]
    owner = f"task {reference!r}{place_of(definition)}"
    check_parameters(owner, definition, parameters, skip=0, table=("task",))
    try:
        task = definition(**parameters)
    except Exception as error:
        raise TaskError(f"task {reference!r}: creating it failed: {described(error)}") from error
    return task  # type: ignore[no-any-return]


def check_signatures(task: AnyTask) -> None:
    """Raises TaskError for a context that is asked for where nobody has one, and for tokens that are none."""
    for name in ("model", "weights", "data"):
        if _asks(task, name):
            raise TaskError(
                f"{type(task).__name__}.{name}() asks for a context, and is called outside of rounds: what "
                f"it makes is the same in all of them; {', '.join(TOLD)} may ask"
            )
    tokens = getattr(task, "example_tokens", None)
    if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1):
        raise TaskError(
            f"{type(task).__name__}.example_tokens is {tokens!r}: it is how many tokens each example has, a "
            "whole number from 1, or None"
        )


def told(task: AnyTask) -> frozenset[str]:
    """The methods of a task that ask for a context; looked up once for each task."""
    try:
        known = _told.get(task)
    except TypeError:
        return _asking(task)  # It cannot be hashed or referred to weakly.
    if known is None:
        known = _told[task] = _asking(task)
    return known


_told: WeakKeyDictionary[AnyTask, frozenset[str]] = WeakKeyDictionary()


def _asking(task: AnyTask) -> frozenset[str]:
    return frozenset(name for name in TOLD if _asks(task, name))


def in_context(task: Any, context: Context) -> Any:
    """The task with `context` handed to the methods that ask for one; itself where none does."""
    asking = told(task)
    return _told_kind(type(task).__name__)(task, context, asking) if asking else task


class ToldTask:
    """A task whose methods get a context, if they ask for one: that which `tell` was last given."""

    def __init__(self, task: AnyTask, context: Context, asking: Iterable[str]) -> None:
        self._task = task
        self._asking = tuple(asking)
        self.tell(context)

    def tell(self, context: Context) -> None:
        """What methods that are called from now on are told."""
        for name in self._asking:
            setattr(self, name, partial(getattr(self._task, name), **{CONTEXT: context}))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)


@cache
def _told_kind(name: str) -> type[ToldTask]:
    """Of the task's own name: messages are about that."""
    return type(name, (ToldTask,), {})


def _asks(task: AnyTask, name: str) -> bool:
    method = getattr(task, name, None)
    if not callable(method):
        return False
    try:
        return CONTEXT in inspect.signature(method).parameters
    except (TypeError, ValueError):
        return False


def lacks(task: AnyTask) -> list[str]:
    """The methods that a task needs to train and does not have."""
    needed = ("weights", "data", "fit") if isinstance(task, ArrayTask) else ("model", "data", "loss")
    return [name for name in needed if not _has(task, name)]


def _find(reference: str, folder: Path) -> Any:
    reference = BUILTIN.get(reference, reference)
    place, _, attribute = reference.partition(":")
    folder = folder.resolve()
    if place.endswith(".py"):
        return _definition(
            import_file(folder / place, f"task {reference!r}", TaskError), attribute, reference
        )
    if attribute:
        return _definition(import_module(place, f"task {reference!r}", TaskError), attribute, reference)
    for entry in entry_points(group=ENTRY_POINTS, name=place):
        module, _, name = entry.value.partition(":")
        return _definition(import_module(module, f"task {reference!r}", TaskError), name, reference)
    beside = folder / f"{place}.py"
    if beside.is_file():
        return _definition(import_file(beside, f"task {reference!r}", TaskError), "", reference)
    raise TaskError(
        f"task {reference!r} not found: no entry point of that name in the group {ENTRY_POINTS!r} "
        f"is installed and there is no {beside}; name it as file.py:Class or module:Class, "
        "or install its package"
    )


def initial_state(task: AnyTask, seed: int) -> nn.Module | dict[str, Tensor]:
    """The task's model (or arrays as tensors) with the weights that `seed` gives, the same anywhere.

    Numbers that it draws from Python's and NumPy's generators follow from it too.
    """
    with isolated_randomness(derive_seed(seed, "model"), torch.device("cpu")):
        if isinstance(task, ArrayTask):
            return {name: _tensor_of(task, name, value) for name, value in task.weights().items()}
        model = task.model()
    name = type(task).__name__
    if not isinstance(model, nn.Module):
        raise TaskError(f"{name}.model() returned a {type(model).__name__}, not a torch.nn.Module")
    if any(map(is_lazy, (*model.parameters(), *model.buffers()))):
        raise TaskError(
            f"{name}.model() returned lazy layers whose shapes are not known yet: state their input sizes, "
            "or call the model once on a batch of zeros before returning it"
        )
    return model


def _tensor_of(task: ArrayTask, name: str, value: np.ndarray) -> Tensor:
    array = np.array(value)
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise TaskError(
            f"{type(task).__name__}.weights(): {name!r} has dtype {array.dtype}, which cannot be averaged"
        ) from error


def _has(task: AnyTask, name: str) -> bool:
    """Whether the user wrote the method: the base classes' own only say that it is missing."""
    own = getattr(type(task), name, None)
    return callable(getattr(task, name, None)) and own not in (
        getattr(Task, name, _ABSENT),
        getattr(ArrayTask, name, _ABSENT),
    )


def _definition(module: ModuleType, attribute: str, reference: str) -> Any:
    if attribute:
        definition = getattr(module, attribute, None)
        if definition is None:
            raise TaskError(f"task {reference!r}: {module.__file__} has no {attribute!r}")
    else:
        classes = [
            value
            for value in vars(module).values()
            if isinstance(value, type)
            and issubclass(value, (Task, ArrayTask))
            and value.__module__ == module.__name__
        ]
        if len(classes) != 1:
            names = ", ".join(cls.__name__ for cls in classes) or "none"
            raise TaskError(
                f"task {reference!r}: {module.__file__} must hold exactly one Task (found: {names}); "
                "name it as file.py:Class"
            )
        definition = classes[0]
    return definition
