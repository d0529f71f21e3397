"""How a compiled step moves the weights: instructions that follow its forward and backward pass.

Numbers by name: `rate` and `-rate`; `kept` is what weight decay and the pull leave of a weight,
1 - rate · (decay + pull). The target (`Vectors.target`) comes in at the rate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from roundtable.core.algorithms.step import LocalStep
from roundtable.simulation.backends.vectorised.instructions import (
    NOWHERE,
    Instruction,
    Kinds,
    Number,
    Place,
    Unsuitable,
    View,
    map_over,
    product,
    whole,
)
from roundtable.simulation.backends.vectorised.lowering import aten, scatter
from roundtable.simulation.backends.vectorised.recording import Call, Ref, ValueLayout

TARGET, VELOCITY, WHOLE, SQUARES = Ref(-1), Ref(-2), Ref(-3), Ref(-4)
"""Vectors beside the weights: the target, velocity, gradients gathered, their sum of squares."""


class Updates:
    """For parameters that begin at `starts` in the flat vector and their gradients (None where unreached).

    `gone` are values that the update makes unnecessary: gradients that nobody but the update would read.
    `by_torch` are the products that torch adds to weights, by parameter, with whether to transpose them.
    """

    def __init__(
        self,
        calls: Sequence[Call],
        kinds: Kinds,
        parameters: Sequence[Ref],
        gradients: Sequence[Ref | None],
        starts: Mapping[Ref, int],
        step: LocalStep,
    ) -> None:
        self._kinds = kinds
        self._reached = [(p, g) for p, g in zip(parameters, gradients, strict=True) if g is not None]
        self._starts = starts
        self._rule = step
        self._makers = {ref: call for call in calls for ref in call.outputs if ref}
        self._uses: dict[Ref, int] = {}
        for ref in [*(r for call in calls for r in call.reads), *(g for _, g in self._reached)]:
            self._uses[ref] = self._uses.get(ref, 0) + 1
        self._redirected: set[Ref] = set()
        self.gone: set[Ref] = set()
        self.by_torch: dict[Ref, tuple[Call, bool]] = {}
        self._direct = {p: self._straight(p, g) for p, g in self._reached} if step.plain else {}

    def redirect(self, owners: set[Ref]) -> dict[Ref, int]:
        """Gradients that are made where they are gathered, and where that is in the flat vector."""
        starts: dict[Ref, int] = {}
        if not self._rule.plain:
            for parameter, gradient in self._reached:
                kind = self._kinds[gradient]
                whole_value = kind.contiguous and kind.shape == self._kinds[parameter].shape
                if gradient in owners and gradient not in starts and whole_value:
                    starts[gradient] = self._starts[parameter]
        self._redirected = set(starts)
        return starts

    def instructions(self) -> list[Instruction]:
        """The update, to be run after everything else."""
        if not self._rule.plain:
            return self._gathered()
        updates: list[Instruction] = []
        for parameter, gradient in self._reached:
            straight = self._direct[parameter]
            updates += self._moved(parameter, gradient) if straight is None else straight
        return updates

    @property
    def _moved_alone(self) -> bool:
        """Whether a weight moves without its gradient."""
        return bool(self._rule.weight_decay) or self._rule.shifted

    @property
    def _drawn(self) -> float | str:
        """Gives the factor of the target q in a step: the rate, or 0 where nothing pulls towards it."""
        return "rate" if self._rule.shifted else 0.0

    def _straight(self, parameter: Ref, gradient: Ref) -> list[Instruction] | None:
        """Where the gradient is one product or the backward of an embedding: straight into the weights."""
        made = self._makers.get(gradient)
        if made is None or self._uses[gradient] != 1:
            return None
        if made.operator is aten.embedding_dense_backward.default:
            try:
                updates = [*self._decayed(parameter), scatter(made, self._kinds, Place(parameter), "-rate")]
            except Unsuitable:
                return None
            self.gone.add(gradient)
            return updates
        turned = made.operator is aten.t.default
        inner = self._makers.get(made.reads[0]) if turned else made
        if inner is None or inner.operator is not aten.mm.default:
            return None
        if turned and self._uses[made.reads[0]] != 1:
            return None
        self.gone |= {gradient, *(made.reads if turned else ())}
        try:
            return [self._product(parameter, inner, turned)]
        except Unsuitable:
            self.by_torch[parameter] = inner, turned
            return self._decayed(parameter)

    def _product(self, parameter: Ref, inner: Call, turned: bool) -> Instruction:
        left, right = (_matrix(ref, self._kinds[ref], turned) for ref in inner.reads)
        if turned:
            left, right = right, left
        stride = self._kinds[parameter].stride
        here, origin = Place(parameter), Place(TARGET, self._starts[parameter])
        shifted = self._rule.shifted
        return product(
            (here, (0, *stride)),
            left,
            right,
            ("-rate", "kept" if self._moved_alone else 1.0, self._drawn),
            ((here, stride[0]), (origin, stride[0]) if shifted else (NOWHERE, 0)),
        )

    def _decayed(self, parameter: Ref) -> list[Instruction]:
        if not self._moved_alone:
            return []
        kind = self._kinds[parameter]
        here = whole(parameter, kind)
        origin = View(Place(TARGET, self._starts[parameter]), kind.stride)
        return [map_over("update", kind.shape, here, [here, origin, origin], ["kept", self._drawn, 0.0])]

    def _moved(self, parameter: Ref, gradient: Ref) -> list[Instruction]:
        """w ← kept · w - rate · g + rate · target."""
        kind = self._kinds[parameter]
        here, slope = whole(parameter, kind), whole(gradient, self._kinds[gradient])
        if not self._moved_alone:
            return [map_over("add", kind.shape, here, [here, slope], ["-rate"])]
        origin = View(Place(TARGET, self._starts[parameter]), kind.stride)
        return [map_over("update", kind.shape, here, [here, slope, origin], ["kept", "-rate", self._drawn])]

    def _gathered(self) -> list[Instruction]:
        """Momentum and clipping look at the gradient as a whole."""
        copies: list[Instruction] = []
        for parameter, gradient in self._reached:
            if gradient not in self._redirected:
                kind = self._kinds[parameter]
                target = View(Place(WHOLE, self._starts[parameter]), kind.stride)
                copies.append(map_over("copy", kind.shape, target, [whole(gradient, self._kinds[gradient])]))
        step, spans = self._rule, self._spans()
        if step.shifted or step.max_norm is not None:
            copies.append(Instruction("zero", (1, Place(SQUARES))))
            for start, length in spans:
                towards = Place(TARGET, start) if step.shifted else NOWHERE
                pulled = (Place(WHOLE, start), self._weights_at(start), towards, Place(SQUARES))
                copies.append(Instruction("pull", (length, Number(step.pull), *pulled)))
        most = -1.0 if step.max_norm is None else step.max_norm
        numbers = (Number(most), Number(step.weight_decay), Number(step.momentum), Number("rate"))
        for start, length in spans:
            places = (Place(WHOLE, start), Place(SQUARES), self._weights_at(start), Place(VELOCITY, start))
            copies.append(Instruction("step", (length, *numbers, *places)))
        return copies

    def _spans(self) -> list[tuple[int, int]]:
        """Where the parameters that have a gradient lie, neighbours together: start and length."""
        spans: list[tuple[int, int]] = []
        for start, parameter in sorted((self._starts[p], p.number) for p, _ in self._reached):
            length = self._kinds[Ref(parameter)].size
            if spans and sum(spans[-1]) == start:
                spans[-1] = (spans[-1][0], spans[-1][1] + length)
            else:
                spans.append((start, length))
        return spans

    def _weights_at(self, start: int) -> Place:
        """A place in the weights, told from the first parameter."""
        parameter = self._reached[0][0]
        return Place(parameter, start - self._starts[parameter])


def _matrix(ref: Ref, kind: ValueLayout, turned: bool) -> tuple[Place, tuple[int, ...], tuple[int, ...]]:
    if turned:
        return Place(ref), (1, *kind.shape[::-1]), (0, *kind.stride[::-1])
    return Place(ref), (1, *kind.shape), (0, *kind.stride)
