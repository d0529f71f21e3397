"""What the compiled kernels can do: instructions with values in place of addresses.

An instruction is the name of an operation of kernels.cpp and its operands in the order in which that file
reads them: whole numbers, `Place` for a tensor, `Number` for a number that is known when the step runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from roundtable.simulation.backends.vectorised.recording import Call, Ref, ValueLayout


@dataclass(frozen=True)
class Place:
    """Where a value begins, `offset` values further on; nowhere for an operand that is missing."""

    ref: Ref | None
    offset: int = 0


@dataclass(frozen=True)
class Number:
    """A number, or by name one that follows from the step's learning rate (`compiled.py`)."""

    value: float | str


Operand = int | Place | Number


@dataclass(frozen=True)
class Instruction:
    """One operation, and a function's name after it where it maps one over tensors.

    `working` is how many values of memory it works in, at SCRATCH: nobody finds there what another left.
    """

    operation: str
    operands: tuple[Operand, ...]
    working: int = 0

    @property
    def refs(self) -> list[Ref]:
        """The values among the operands."""
        return [o.ref for o in self.operands if isinstance(o, Place) and o.ref is not None]


@dataclass(frozen=True)
class View:
    """A tensor as an operand: its place, and the strides over the shape that an instruction runs over."""

    place: Place
    stride: tuple[int, ...]


class Unsuitable(Exception):
    """The kernels cannot do this as it is; torch does it."""


Kinds = Mapping[Ref, ValueLayout]
Lowering = Callable[[Call, Kinds], Sequence[Instruction]]
NOWHERE, SCRATCH = Place(None), Ref(-5)
SMALL, SMALLEST, LARGE = 64, 12, 1 << 19
"""A product is done by kernels.cpp if its least dimension is at most SMALL, and at most SMALLEST where the
matrix of the other two has more than LARGE values (2 MiB): torch's library packs, and does better there."""


def output(call: Call, number: int = 0) -> Ref:
    """What a call gives; Unsuitable where it gives nothing there."""
    ref = call.outputs[number]
    if ref is None:
        raise Unsuitable("it has no such output")
    return ref


def solid(ref: Ref | None, kinds: Kinds) -> Place:
    """The place of a value that must be contiguous; nowhere for one that is missing."""
    if ref is None:
        return NOWHERE
    if not kinds[ref].contiguous:
        raise Unsuitable("its values do not lie one after the other")
    return Place(ref)


def whole(ref: Ref, kind: ValueLayout) -> View:
    """A value over its own shape."""
    return View(Place(ref), kind.stride)


def over(ref: Ref, kind: ValueLayout, shape: Sequence[int]) -> View:
    """A value over a shape that it broadcasts to."""
    missing = len(shape) - len(kind.shape)
    if missing < 0:
        raise Unsuitable("it is not broadcast, but summed over")
    stride = [0] * missing + [
        0 if length == 1 else step for length, step in zip(kind.shape, kind.stride, strict=True)
    ]
    return View(Place(ref), tuple(stride))


def map_over(
    name: str, shape: Sequence[int], out: View, inputs: Sequence[View], numbers: Sequence[float | str] = ()
) -> Instruction:
    """`out` ← the function `name` of each of the inputs' values; raises Unsuitable beyond four dimensions."""
    lengths, strides = _merged(shape, [view.stride for view in (out, *inputs)])
    if len(lengths) > 4:
        raise Unsuitable("it has more than four dimensions that cannot be merged")
    filling = 4 - len(lengths)
    three = [*numbers, 0.0, 0.0, 0.0][:3]
    operands: list[Operand] = [len(inputs), *([1] * filling), *lengths, *(Number(value) for value in three)]
    for view, stride in zip((out, *inputs), strides, strict=True):
        operands += [view.place, *([0] * filling), *stride]
    return Instruction(f"map {name}", tuple(operands))


def sum_over(out: View, view: View, shape: Sequence[int], summed: Sequence[int]) -> Instruction:
    """`out` ← the sum of `view` over the dimensions `summed`; `out` has strides over `shape` too."""
    kept = [d for d in range(len(shape)) if d not in summed]
    lengths, (out_stride, in_stride) = _merged(
        [shape[d] for d in kept], [tuple(v.stride[d] for d in kept) for v in (out, view)]
    )
    gone, (gone_stride,) = _merged([shape[d] for d in summed], [tuple(view.stride[d] for d in summed)])
    if len(lengths) > 3 or len(gone) > 2:
        raise Unsuitable("it sums over dimensions that cannot be merged")
    before, inside = 3 - len(lengths), 2 - len(gone)
    operands: list[Operand] = [*([1] * before), *lengths, *([1] * inside), *gone, out.place]
    operands += [*([0] * before), *out_stride, view.place, *([0] * before), *in_stride]
    return Instruction("sum", (*operands, *([0] * inside), *gone_stride))


def product(
    out: tuple[Place, tuple[int, ...]],
    left: tuple[Place, tuple[int, ...], tuple[int, ...]],
    right: tuple[Place, tuple[int, ...], tuple[int, ...]],
    numbers: tuple[float | str, float | str, float | str] = (1.0, 0.0, 0.0),
    added: tuple[tuple[Place, int], tuple[Place, int]] = ((NOWHERE, 0), (NOWHERE, 0)),
) -> Instruction:
    """out ← alpha · left @ right + beta · added[0] + gamma · added[1], `numbers` being alpha, beta and gamma.

    Places with their strides, `left` [batch, m, k] and `right` [batch, k, n] with their shapes too; what is
    added has a stride for its rows, and its columns lie one after the other. Raises Unsuitable where the
    kernels would be slow or cannot walk over the values.
    """
    place, (out_step, out_row, out_column) = out
    (a, (count, m, depth), (a_step, a_row, a_column)) = left
    (b, (_, _, n), (b_step, b_row, b_column)) = right
    dots = (b_row == 1 or depth == 1) and (a_column == 1 or depth == 1)
    sweeps = b_column == 1 or n == 1
    least = min(m, n, depth)
    fits = least <= (SMALL if m * n * depth <= LARGE * least else SMALLEST)
    if not fits or not (dots or sweeps) or (out_column != 1 and n != 1):
        raise Unsuitable("its matrices are too large or lie otherwise")
    # The kernel takes the inner products where columns of `right` do not lie one after the other.
    column = 1 if sweeps and not (dots and n == 1) else max(b_column, depth, 2)
    operands: list[Operand] = [count, m, n, depth, place, out_step, out_row, a, a_step, a_row, a_column]
    operands += [b, b_step, b_row, column, *(Number(value) for value in numbers)]
    for extra, row in added:
        operands += [extra, row]
    return Instruction("product", tuple(operands))


def _merged(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """The same walk with as few dimensions as there can be, at least one."""
    lengths: list[int] = []
    steps: list[list[int]] = [[] for _ in strides]
    for d, length in enumerate(shape):
        if length == 1:
            continue
        here = [stride[d] for stride in strides]
        if lengths and all(s[-1] == h * length for s, h in zip(steps, here, strict=True)):
            lengths[-1] *= length
            for s, h in zip(steps, here, strict=True):
                s[-1] = h
        else:
            lengths.append(length)
            for s, h in zip(steps, here, strict=True):
                s.append(h)
    return (lengths, steps) if lengths else ([1], [[0] for _ in strides])
