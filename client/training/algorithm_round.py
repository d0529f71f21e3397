"""A client's round as its algorithm sees it: vectors in; an update with its places, and what is kept, out."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from roundtable.client.training.local_work import LocalWork
from roundtable.core.algorithms.contract import (
    BEGINS,
    ENDS,
    SECOND,
    ClientAlgorithm,
    ClientRound,
    Sent,
)
from roundtable.core.algorithms.passes import put
from roundtable.core.algorithms.round_context import Context, OuterStep
from roundtable.core.algorithms.schedules import Schedule
from roundtable.core.config import JobConfig
from roundtable.core.errors import InvalidUpdate, TaskError
from roundtable.core.layout import Layout
from roundtable.core.privacy_table import bound_of

_PREFIX = "algorithm/"


class AlgorithmRound:
    """The hooks of one client's round, called by whatever trains it.

    `constant` is what each step adds to the gradient, float32 [d] on CPU, where its algorithm's step is
    `corrected`. `measure` serves algorithms that declare `measures`.
    """

    def __init__(
        self,
        work: LocalWork,
        context: Context,
        trained: Sequence[slice],
        measure: Callable[[], tuple[float, Tensor]] | None = None,
    ) -> None:
        self.algorithm = work.rules()
        self.step = self.algorithm.step()
        self._layout = work.layout
        self.round = begun(work, context, trained, measure)
        self.constant = self._begin()
        self.second = self.algorithm.second(self.round)
        self.held = self.algorithm.holds(self.round)

    def phase(self, number: int) -> Hashable:
        """The phase of step `number`, from 1."""
        return self.algorithm.phase(self.round, number)

    def _begin(self) -> Tensor | None:
        constant = self.algorithm.begin(self.round)
        wanted = (self._layout.model.size,)
        if self.step.corrected and (constant is None or constant.shape != wanted):
            found = None if constant is None else list(constant.shape)
            raise TaskError(
                f"algorithm {self.algorithm.table.name!r}: its step is corrected, and begin() gave {found} "
                f"in the place of a constant of shape {list(wanted)}"
            )
        return constant if self.step.corrected else None

    def constants(self, module: nn.Module, parameters: Sequence[nn.Parameter]) -> list[Tensor] | None:
        """The constant by parameter, as each lies."""
        return self._by_parameter(self.constant, module, parameters)

    def second_constants(self, module: nn.Module, parameters: Sequence[nn.Parameter]) -> list[Tensor] | None:
        """The same of the second model."""
        constant = self.second.constant if self.second is not None else None
        return self._by_parameter(constant, module, parameters)

    def ends_second(self, values: Tensor) -> None:
        """What the second model [d] ended with, for `end`. Raises InvalidUpdate where it is not finite."""
        self.ends_held({SECOND: values})

    def ends_held(self, values: Mapping[str, Tensor]) -> None:
        """What became of all that is held, for `end`. Raises InvalidUpdate where it is not finite."""
        for value in values.values():
            if not value.isfinite().all():
                name = self.algorithm.table.name
                raise InvalidUpdate(
                    "non_finite",
                    f"a client's own model of algorithm {name!r} is not finite any more; lower its learning "
                    "rate",
                )
        self.round.scratch.update(values)

    def _by_parameter(
        self, vector: Tensor | None, module: nn.Module, parameters: Sequence[nn.Parameter]
    ) -> list[Tensor] | None:
        if vector is None:
            return None
        views = self._layout.model.unflatten(vector)
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        return [views[names[id(p)]].to(p.device, p.dtype) for p in parameters]

    def begins(self, module: nn.Module) -> None:
        """Puts weights of the client's own into the module, where it trains from such."""
        start = self.algorithm.begins(self.round)
        if start is not None:
            put(module, self._layout.model, start)
            self.round.scratch[BEGINS] = start

    def leaves(self, module: nn.Module) -> None:
        """What training made of these weights, for `end`."""
        if BEGINS in self.round.scratch:
            left = torch.empty(self._layout.model.size)
            self.round.scratch[ENDS] = self._layout.model.flatten(module, left)

    def arrived(self, vector: Tensor) -> None:
        """The model that the round is of, and its places, where training began before they were there."""
        down = {name: vector[place] for name, place in self._layout.places.items()}
        self.round = replace(self.round, vector=vector[: self._layout.model.size], down=down)

    @property
    def ends(self) -> bool:
        """Whether the end of a round leaves more than the update."""
        return bool(self._layout.places) or type(self.algorithm).end is not ClientAlgorithm.end

    def end(self, row: Tensor, steps: int) -> dict[str, Tensor]:
        """Ends the round: `row` [layout.sent.size] begins with local − global and receives what is sent.

        Gives the tensors that the client keeps. Raises TaskError where the algorithm gives other places than
        it declared, InvalidUpdate where one is not finite.
        """
        if not self.ends:
            return {}
        size = self._layout.model.size
        sent = self.algorithm.end(self.round, row[:size], steps)
        if sent.update.data_ptr() != row.data_ptr():
            row[:size].copy_(sent.update)
        self._put_places(sent, row)
        return {_PREFIX + name: value for name, value in sent.kept.items()}

    def answer(self, data: Any, row: Tensor) -> dict[str, Tensor]:
        """In the place of training: `row` [layout.sent.size] receives what is sent; gives what is kept."""
        sent = self.algorithm.answer(self.round, data)
        row[: self._layout.model.size].copy_(sent.update)
        self._put_places(sent, row)
        return {_PREFIX + name: value for name, value in sent.kept.items()}

    def _put_places(self, sent: Sent, row: Tensor) -> None:
        places = self._layout.sent.places
        if set(sent.up) != set(places):
            raise TaskError(
                f"algorithm {self.algorithm.table.name!r}: end() gave the places {sorted(sent.up)}, and "
                f"{sorted(places)} are declared"
            )
        for name, place in places.items():
            row[place].copy_(sent.up[name].reshape(-1))
            if not row[place].isfinite().all():
                raise InvalidUpdate(
                    "non_finite", f"what the algorithm sends in its place {name!r} is not finite"
                )


def preparation(
    work: LocalWork, device: torch.device, tune: Callable[[nn.Module, int, float], None]
) -> Callable[[nn.Module], None] | None:
    """What turns the global model in a module into the client's own before evaluation; None for nothing.

    `tune` takes so many steps at this rate on the client's training data.
    """
    algorithm = work.rules()
    if not type(algorithm).personal():
        return None

    def prepare(module: nn.Module) -> None:
        trained = trained_slices(module, work.layout)
        context = work.evaluation_context(device)
        algorithm.before_evaluation(replace(begun(work, context, trained), tune=tune), module)

    return prepare


def begun(
    work: LocalWork,
    context: Context,
    trained: Sequence[slice],
    measure: Callable[[], tuple[float, Tensor]] | None = None,
) -> ClientRound:
    """The round as its hooks see it."""
    layout, algorithm = work.layout, work.rules()
    return ClientRound(
        alone=work.alone,
        compare=work.compare,
        context=context,
        step=algorithm.step(),
        rate=work.job.algorithm.rate(work.round),
        vector=work.vector[: layout.model.size],
        down={name: work.vector[place] for name, place in layout.places.items()},
        kept=kept_tensors(work.local),
        layout=layout.model,
        trained=trained,
        measure=measure if algorithm.measures else None,
        bound=bound_of(work.job.privacy),
        outer=_outer_step(work.job, work.round) if algorithm.composition.outer_step else None,
    )


def _outer_step(job: JobConfig, round: int) -> OuterStep:
    table, size = job.aggregation.server_optimizer, job.cohort.size
    assert size is not None, "checked before round 1"
    rate = table.learning_rate * Schedule.of(table.schedule).factor(round - 1)
    return OuterStep(rate, table.momentum or 0.0, 1 / size)


def kept_tensors(local: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """The algorithm's own among the tensors that a client keeps."""
    own = (local or {}).items()
    return {name.removeprefix(_PREFIX): value for name, value in own if name.startswith(_PREFIX)}


def trained_slices(module: nn.Module, layout: Layout) -> list[slice]:
    """Where in the flat vector the parameters lie that training moves."""
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    specs = (spec for spec in layout.model.averaged if spec.name in trained)
    return [slice(spec.offset, spec.offset + spec.size) for spec in specs]
