"""A probed model's work and weights by unit, added up once for each way to split them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

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
        self._work: dict[tuple[int, bool], dict[str | None, PassWork]] = {}
        self._weights: dict[tuple[int, int, int], dict[str | None, Weights]] = {}
        whole = sum(probe.work.forward.values(), PassWork())
        back = probe.work.backward
        self._ratio = (
            back.flops / whole.flops if whole.flops else 2.0,
            back.moved / whole.moved if whole.moved else 2.0,
            back.weights / whole.weights if whole.weights else 2.0,
            back.calls / whole.calls if whole.calls else 2.0,
        )

    def work(self, strategy: Strategy, units: Iterable[str], *, rest: bool) -> PassWork:
        """A rank's part of the units' forward pass, with `rest` what lies in none too."""
        key = strategy.mesh.tp, strategy.sequence_parallel
        if key not in self._work:
            self._work[key] = self._divided(strategy)
        table = self._work[key]
        names: list[str | None] = [*units, None] if rest else list(units)
        return sum((table[name] for name in names if name in table), PassWork())

    def backward(self, forward: PassWork) -> PassWork:
        """The backward pass of what has this forward pass: in the proportion of the whole model's."""
        flops, moved, weights, calls = self._ratio
        return PassWork(
            forward.flops * flops, forward.moved * moved, forward.weights * weights, forward.calls * calls
        )

    def _divided(self, strategy: Strategy) -> dict[str | None, PassWork]:
        probe, tp = self._probe, strategy.mesh.tp
        one = Pass(probe.anatomy, probe.trace, probe.tensor_parallel, strategy)
        styles = probe.tensor_parallel.styles
        # What holds a layer split by rows works on parts, also where a task's own plan does not say so.
        around = {name.rpartition(".")[0] for name, style in styles.items() if style == "row"}
        table: dict[str | None, PassWork] = {}
        for name, work in probe.work.forward.items():
            split = tp > 1 and name in styles
            share = tp if split or (tp > 1 and name in around) else one.divisor(name)
            weights = tp if split else 1
            unit = self._probe.anatomy.unit_of(name)
            mine = PassWork(work.flops / share, work.moved / share, work.weights / weights, work.calls)
            table[unit] = table.get(unit, PassWork()) + mine
        return table

    def weights(self, strategy: Strategy, units: Iterable[str]) -> Weights:
        """Of the units on a rank before sharding; of the whole model where it is not cut into stages."""
        key = strategy.mesh.tp, strategy.mesh.ep, strategy.travel.rank
        if key not in self._weights:
            self._weights[key] = self._split(strategy)
        table = self._weights[key]
        names = table if strategy.mesh.pp == 1 else [name for name in units if name in table]
        return sum((table[name] for name in names), Weights())

    def _split(self, strategy: Strategy) -> dict[str | None, Weights]:
        return {
            unit: sum((_of(part, strategy.travel.rank) for part in parts), Weights())
            for unit, parts in parts_of(self._probe, strategy).items()
        }

    @cached_property
    def split_outputs(self) -> dict[str | None, Counter[tuple[str, int]]]:
        """By unit how many calls have an output or gradient that is summed or gathered: (style, elements)."""
        probe = self._probe
        styles = probe.tensor_parallel.styles
        found: dict[str | None, Counter[tuple[str, int]]] = defaultdict(Counter)
        for call in probe.trace.calls:
            style = styles.get(call.name)
            if style in ("row", "attention", "vocabulary", "head"):
                shape: Sequence[int] | None = call.output or next((s for s in call.inputs if s), None)
                found[probe.anatomy.unit_of(call.name)][str(style), prod(shape) if shape else 0] += 1
        return found

    @cached_property
    def expert_inputs(self) -> list[tuple[str | None, int]]:
        """(unit, elements) of each call of experts that are shared out."""
        calls = (call for call in self._probe.trace.calls if call.name in self._probe.experts)
        return [
            (self._probe.anatomy.unit_of(c.name), prod(c.inputs[0]))
            for c in calls
            if c.inputs and c.inputs[0]
        ]
