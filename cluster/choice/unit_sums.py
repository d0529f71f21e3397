"""A probed model's work and weights by unit, added up once for each way to split them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

from roundtable.cluster.parallel.strategy import Strategy
from roundtable.cluster.plan.activations import Pass
from roundtable.cluster.plan.arithmetic import PassWork
from roundtable.cluster.plan.memory_estimate import ModelProbe, Part, parts_of


@dataclass(frozen=True)
class Weights:
    """Bytes of weights in their own precision, and of those that are trained; bytes of the trained ones as
    factors of PowerSGD; how many are trained.
    """

    bytes: float = 0.0
    trained: float = 0.0
    factors: float = 0.0
    count: int = 0

    def __add__(self, other: Weights) -> Weights:
        return Weights(
            self.bytes + other.bytes,
            self.trained + other.trained,
            self.factors + other.factors,
            self.count + other.count,
        )


def _of(part: Part, rank: int) -> Weights:
    weight, size = part.weight, part.bytes
    rows, columns = weight.shape[0] if weight.shape else 1, prod(weight.shape[1:])
    factors = min(size, rank * (rows + columns) * weight.itemsize) if columns > 1 else size
    return Weights(size, size, factors, 1) if weight.trainable else Weights(size)


class UnitSums:
    """Sums over a model's units; under None what lies in no unit, which the last stage does."""

    def __init__(self, probe: ModelProbe) -> None:
        self._probe = probe
        self._work: dict[tuple[int, bool, bool], dict[str | None, PassWork]] = {}
        self._known: dict[tuple[Any, ...], Any] = {}
        self._weights: dict[tuple[int, int, int], dict[str | None, Weights]] = {}
        whole = sum(probe.work.forward.values(), PassWork())
        pairs = zip(probe.work.backward.values, whole.values, strict=True)
        self._ratio = tuple(behind / ahead if ahead else 2.0 for behind, ahead in pairs)

    def work(self, strategy: Strategy, units: Sequence[str], *, rest: bool, lasting: bool = True) -> PassWork:
        """A rank's part of the units' forward pass, with `rest` what lies in none too.

        `lasting`: the list is one that comes again.
        """
        key = strategy.mesh.tp, strategy.mesh.ep > 1, strategy.sequence_parallel
        if key not in self._work:
            self._work[key] = self._divided(strategy)
        table = self._work[key]

        def total() -> PassWork:
            names: list[str | None] = [*units, None] if rest else list(units)
            return sum((table[name] for name in names if name in table), PassWork())

        found: PassWork = self.remembered(("work", *key, rest), (units,), total) if lasting else total()
        return found

    def remembered(self, key: tuple[Any, ...], of: tuple[object, ...], made: Callable[[], Any]) -> Any:
        """What `made` makes of these objects, once: lists of units are the same ones again and again."""
        full = (*key, *map(id, of))
        if full not in self._known:
            # Holds the objects, so that no others get their identities.
            self._known[full] = of, made()
        return self._known[full][1]

    def blocks(self, units: Sequence[str]) -> list[str]:
        """The model's blocks among these units."""

        def among() -> list[str]:
            there = set(units)
            return [block for block in self._probe.anatomy.blocks if block in there]

        found: list[str] = self.remembered(("blocks",), (units,), among)
        return found

    def backward(self, forward: PassWork) -> PassWork:
        """The backward pass of what has this forward pass: in the proportion of the whole model's."""
        return PassWork(*(value * ratio for value, ratio in zip(forward.values, self._ratio, strict=True)))

    def _divided(self, strategy: Strategy) -> dict[str | None, PassWork]:
        probe, tp = self._probe, strategy.mesh.tp
        one = Pass(probe.anatomy, probe.trace, probe.tensor_parallel, strategy)
        styles = probe.tensor_parallel.styles
        # What holds a layer split by rows works on parts, also where a task's own plan does not say so.
        around = {name.rpartition(".")[0] for name, style in styles.items() if style == "row"}
        table: dict[str | None, PassWork] = {}
        for name, work in probe.work.forward.items():
            split = tp > 1 and name in styles
            share = float(tp if split or (tp > 1 and name in around) else one.divisor(name))
            weights = tp if split else 1
            unit = self._probe.anatomy.unit_of(name)
            if strategy.mesh.ep > 1:
                # The step waits for the rank whose experts have most tokens.
                share /= probe.crowding.get(name, 1.0)
            mine = replace(
                PassWork(*(value / share for value in work.values)),
                weights=work.weights / weights,
                calls=work.calls,
            )
            table[unit] = table.get(unit, PassWork()) + mine
        return table

    def weights(self, strategy: Strategy, units: Iterable[str]) -> Weights:
        """Of the units on a rank before sharding; of the whole model where it is not cut into stages."""
        key = strategy.mesh.tp, strategy.mesh.ep, strategy.travel.rank
        if key not in self._weights:
            self._weights[key] = self._split(strategy)
        table, whole = self._weights[key], strategy.mesh.pp == 1

        def total() -> Weights:
            names = table if whole else [name for name in units if name in table]
            return sum((table[name] for name in names), Weights())

        found: Weights = self.remembered(("weights", *key, whole), (units,), total)
        return found

    def _split(self, strategy: Strategy) -> dict[str | None, Weights]:
        return {
            unit: sum((_of(part, strategy.travel.rank) for part in parts), Weights())
            for unit, parts in parts_of(self._probe, strategy).items()
        }

    @cached_property
    def split_outputs(self) -> dict[str | None, Counter[tuple[str, int]]]:
        """By unit how many calls have an output or gradient that is summed or gathered: (style, elements).

        A layer split by columns sums the gradient of its input, one split by rows its output. With a split
        sequence norms sum the gradients of their weights, and what is around split layers is gathered.
        """
        probe = self._probe
        styles = probe.tensor_parallel.styles
        found: dict[str | None, Counter[tuple[str, int]]] = defaultdict(Counter)
        for call in probe.trace.calls:
            style = styles.get(call.name)
            if call.name in probe.tensor_parallel.norms:
                width = (call.output or (1,))[-1]
                found[probe.anatomy.unit_of(call.name)]["norm", width] += 1
            if call.name in probe.tensor_parallel.inner:
                found[probe.anatomy.unit_of(call.name)]["inner", 1] += 1
            if style is None:
                continue
            given = next((s for s in call.inputs if s), None)
            shapes = [given if style == "column" else call.output or given]
            unit = found[probe.anatomy.unit_of(call.name)]
            unit[style, prod(shapes[0] or (0,))] += 1
            if style == "head":
                unit["column", prod(given or (0,))] += 1
        return found

    def split_layers(self, units: Sequence[str], *, rest: bool, sequence: bool) -> int:
        """How many calls of layers of these units go over DTensors, with `rest` of what lies in none too.

        With a split `sequence` those of norms and of what gathers it too.
        """
        weights = {"head": 0, "norm": int(sequence), "inner": int(sequence)}
        names = [*units, None] if rest else units
        tables = (self.split_outputs.get(name, Counter()) for name in names)
        return sum(number * weights.get(style, 1) for table in tables for (style, _), number in table.items())

    def split_calls(
        self, units: Sequence[str], again: Sequence[str], *, rest: bool
    ) -> Counter[tuple[str, int, bool]]:
        """How many calls of these units, with `rest` of what lies in none too, are summed or gathered.

        By (style, elements, whether it is in a unit that is computed `again`).
        """

        def total() -> Counter[tuple[str, int, bool]]:
            repeated, calls = set(again), Counter[tuple[str, int, bool]]()
            for unit in [*units, None] if rest else units:
                for (style, elements), number in self.split_outputs.get(unit, {}).items():
                    calls[style, elements, unit in repeated] += number
            return calls

        # None, all, or some of the blocks: of these there are too many to be remembered.
        blocks = self.blocks(units)
        if again and len(again) < len(blocks):
            return total()
        found: Counter[tuple[str, int, bool]] = self.remembered(("calls", bool(again), rest), (units,), total)
        return found

    @cached_property
    def expert_inputs(self) -> list[tuple[str | None, int]]:
        """(unit, elements) of each call of experts that are shared out, for the rank that gets most."""
        calls = (call for call in self._probe.trace.calls if call.name in self._probe.experts)
        return [
            (
                self._probe.anatomy.unit_of(c.name),
                int(prod(c.inputs[0]) * self._probe.crowding.get(c.name, 1.0)),
            )
            for c in calls
            if c.inputs and c.inputs[0]
        ]
