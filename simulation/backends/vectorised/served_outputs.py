"""A module that gives outputs which are there already, where a task asks it for them.

Whether that is sound is found out before: the task is held against itself, at inputs that the job alone
decides, so that who is measured first in a process does not matter. Everything else that a task does with the
module, or with what it was given, is done by the module itself.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from roundtable.client.training.metrics import as_sums
from roundtable.core.task import Task
from roundtable.simulation.backends.module_condition import ModuleComposition, ModuleCondition
from roundtable.simulation.backends.vectorised.library import load
from roundtable.simulation.backends.vectorised.recording import Unrecordable
from roundtable.simulation.backends.vectorised.row_forward import RowForward

log = logging.getLogger("roundtable.simulation")
_TOLERANCE = 1e-4
Parts = tuple[Tensor, ...]
_Figures = dict[str, tuple[float, int]]


class ServedOutputs:
    """What `module` gives for the parts of a batch that a task hands to it, made once for each batch, and for
    several batches at a time where it `joins` them.

    Raises Unrecordable where the task asks for something else, or where its figures would be others.
    """

    def __init__(self, task: Task, module: nn.Module, examples: Sequence[Tensor]) -> None:
        """`module` is in evaluation mode; `examples` [n, ...] are a batch that the task is tried on."""
        self._module = module
        self._forward = module.forward
        self._expected: dict[int, tuple[Parts, list[int]]] = {}
        self._known: dict[int, Tensor] = {}
        self._places: tuple[int, ...] = ()
        self._rows: RowForward | None = None
        self._fresh = True
        self._condition = ModuleCondition(module)
        self._composition = ModuleComposition(module)
        if any(part._forward_hooks or part._forward_pre_hooks for part in module.modules()):
            raise Unrecordable("its modules have hooks")
        self._try(task, examples)

    @property
    def joins(self) -> bool:
        """Whether batches share a pass."""
        return self._rows is not None

    def through(self, parts: Parts) -> Tensor | None:
        """What the model gives [n, ...] for n rows of several batches' parts, in one pass; None where each
        batch needs a pass of its own."""
        if self._rows is None or not self._has_places(parts):
            return None
        given = [parts[place] for place in self._places]
        if not self._rows.takes(given) or not (self._fresh and self._condition.holds()):
            return None
        try:
            return self._rows(given)
        except IndexError:
            return None  # Each client is asked for itself, and torch says which value it was.

    def expect(self, batches: Sequence[Parts], outputs: Sequence[Tensor] = ()) -> None:
        """The task will be asked to measure these, and no earlier ones any more; `outputs` are what the model
        gives for each, or nothing."""
        self._expected, self._known = {}, {}
        if not self._has_places(batches[0]):
            return
        for batch in batches:
            inputs = tuple([batch[place] for place in self._places])
            self._expected[id(inputs[0])] = inputs, [part._version for part in inputs]
        self._known = dict(zip(self._expected, outputs, strict=bool(outputs)))

    def holds(self) -> bool:
        """Whether the module is as it was when it was told to give what is there."""
        return self._condition.holds()

    @contextmanager
    def giving(self, batch: Parts, outputs: Tensor) -> Iterator[None]:
        """Inside, the module gives `outputs` for this batch. Unrecordable where it is asked for another."""

        def forward(*given: Any, **named: Any) -> Tensor:
            wanted = [batch[place] for place in self._places] if self._has_places(batch) else []
            if (
                named
                or len(given) != len(wanted)
                or any(a is not b for a, b in zip(given, wanted, strict=True))
            ):
                raise Unrecordable("the task asks the model about something else than the batch as it is")
            return outputs

        before = vars(self._module).get("forward")
        vars(self._module)["forward"] = forward
        try:
            yield
        finally:
            del vars(self._module)["forward"]
            if before is not None:
                vars(self._module)["forward"] = before

    def _has_places(self, parts: Parts) -> bool:
        """Whether a batch of such parts has those that the task hands to the model."""
        return all(place < len(parts) for place in self._places)

    @contextmanager
    def served(self) -> Iterator[None]:
        """Inside, the module as it now is gives the outputs of what is expected."""
        self._expected, self._known = {}, {}
        self._condition = ModuleCondition(self._module)
        # Else what was recorded reads tensors that are no longer the module's.
        self._fresh = self._composition.holds()
        vars(self._module)["forward"] = self._serve
        try:
            yield
        finally:
            del vars(self._module)["forward"]
            self._expected, self._known = {}, {}

    def _serve(self, *given: Any, **named: Any) -> Any:
        key = id(given[0]) if given else 0
        if named or key not in self._expected or not self._sound(given, *self._expected[key]):
            return self._forward(*given, **named)
        known = self._known.get(key)
        if known is None:
            known = self._forward(*given)
            if not isinstance(known, Tensor):
                return known
            self._known[key] = known
        # A task may change what it is given.
        return known.clone()

    def _sound(self, given: Sequence[Any], inputs: Sequence[Tensor], versions: Sequence[int]) -> bool:
        """Whether the module was asked for the very inputs, as they and it were then, and for no more."""
        if len(given) != len(inputs) or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return False
        for mine, theirs, before in zip(given, inputs, versions, strict=True):
            if mine is not theirs or theirs._version != before:
                return False
        return self._condition.holds()

    def _try(self, task: Task, examples: Sequence[Tensor]) -> None:
        """The task on a batch and on another one by itself, then on the first with outputs that are there."""
        rows = torch.arange(len(examples[0]))

        def batch(rows: Tensor) -> Parts:
            return tuple(part.index_select(0, rows) for part in examples)

        asked: set[tuple[int, ...]] = set()
        first = batch(rows)
        vars(self._module)["forward"] = partial(self._watched, first, asked)
        try:
            alone = figures_of(task, self._module, first)
        finally:
            del vars(self._module)["forward"]
        if len(asked) != 1:
            raise Unrecordable("the task asks the model about no batch as it is, or about its parts in turn")
        (self._places,) = asked
        library = load()
        try:
            inputs = [batch(rows)[place] for place in self._places]
            self._rows = None if library is None else RowForward(library, self._module, inputs)
        except Unrecordable as error:
            log.debug("clients do not share a forward pass: %s", error)
        if self._rows is not None and not self._serves(task, alone, batch, rows):
            self._rows = None
        if self._rows is None and not self._serves(task, alone, batch, rows):
            raise Unrecordable("the task measures something else where outputs are there already")

    def _serves(self, task: Task, alone: _Figures, batch: Callable[[Tensor], Parts], rows: Tensor) -> bool:
        """Whether the task's figures of these rows are those that it has `alone`."""
        # What a pass leaves in the module for the task to read is another batch's by now.
        figures_of(task, self._module, batch(rows.flip(0)[:-1]))
        first = batch(rows)
        with self.served():
            outputs = self.through(first)
            self.expect([first], () if outputs is None else [outputs])
            return _alike(alone, figures_of(task, self._module, first))

    def _watched(
        self, batch: Sequence[Tensor], asked: set[tuple[int, ...]], *given: Any, **named: Any
    ) -> Any:
        """The pass itself; notes which parts of the batch it is asked about."""
        numbers = {id(part): place for place, part in enumerate(batch)}
        places = [numbers.get(id(value), -1) for value in given]
        if places and -1 not in places and not named:
            asked.add(tuple(places))
        before = chance_state()
        found = self._forward(*given, **named)
        if chance_state() != before:
            raise Unrecordable("the model draws random numbers")
        return found


def figures_of(task: Task, module: nn.Module, batch: Parts) -> _Figures:
    found = {"loss": (float(task.loss(module, batch)), 1)}
    measure = getattr(task, "metrics", None)
    return found if measure is None else found | as_sums(measure(module, batch), task)


def _alike(alone: _Figures, shared: _Figures) -> bool:
    if alone.keys() != shared.keys():
        return False
    pairs = [(alone[name], shared[name]) for name in alone]
    return all(
        mine[1] == theirs[1] and bool(np.isclose(mine[0], theirs[0], _TOLERANCE, _TOLERANCE, equal_nan=True))
        for mine, theirs in pairs
    )


def chance_state() -> tuple[Any, ...]:
    """The state of each global generator."""
    numpy: Any = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), numpy[1].tolist(), numpy[2:]
