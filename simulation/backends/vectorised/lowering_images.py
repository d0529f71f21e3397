"""Convolutions and pooling as instructions for the compiled kernels, where those do better than torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from roundtable.simulation.backends.vectorised.instructions import (
    SCRATCH,
    Instruction,
    Kinds,
    Lowering,
    Place,
    Unsuitable,
    View,
    output,
    solid,
    sum_over,
    whole,
)
from roundtable.simulation.backends.vectorised.recording import Call, Operator, Ref

aten = torch.ops.aten
MARGIN = 16
"""Room after the windows of a tile and after each row of them: MARGIN of kernels_images.h."""
STEP, SHORT, LONG = 48, 192, 384
"""Windows that are laid out at a time: in steps that are whole vectors of any processor; LONG is the most."""
COLUMNS, ROWS = 1 << 16, 200
"""Values laid out of a tile: 256 KiB stay in the second-level cache. Rows laid out of a gradient."""
LARGEST = 4096
"""Values of a convolution's weights, beyond which torch's library does better: it lays out nothing."""


def _pair(value: Sequence[int] | int) -> tuple[int, int]:
    """Down and right; one dimension has no down."""
    values = [value] if isinstance(value, int) else list(value)
    return (values[0], values[-1])


class _Windows:
    """What a convolution looks through, as kernels_images.h has it; images of one dimension are one line."""

    def __init__(self, call: Call, kinds: Kinds, image: Ref, weight: Ref, rest: Sequence[Any]) -> None:
        stride, padding, dilation, transposed, _, groups = rest
        if transposed or groups != 1 or any(d != 1 for d in dilation):
            raise Unsuitable("it is transposed, dilated or in groups")
        shape, kernel = kinds[image].shape, kinds[weight].shape
        if len(shape) not in (3, 4):
            raise Unsuitable("its images have neither one dimension nor two")
        line = len(shape) == 3
        self.batch, self.channels = shape[:2]
        self.kernels = kernel[0]
        image_size, size = ((1, *part[2:]) if line else part[2:] for part in (shape, kernel))
        step, margin = (((first,) * line + tuple(part)) for first, part in ((1, stride), (0, padding)))
        if size == (1, 1) and step == (1, 1) and margin == (0, 0):
            image_size = (1, image_size[0] * image_size[1])
        self.size = size[0] * size[1]
        self.out = [
            (n + 2 * m - k) // s + 1 for n, m, k, s in zip(image_size, margin, size, step, strict=True)
        ]
        self.depth = self.channels * self.size
        if self.kernels * self.depth > LARGEST:
            raise Unsuitable("torch does better")
        self.area = self.out[0] * self.out[1]
        self.frame = self.channels * (image_size[0] + 2 * margin[0]) * (image_size[1] + 2 * margin[1])
        self.padded = margin != (0, 0)
        self.operands = (
            self.batch,
            self.channels,
            *image_size,
            self.kernels,
            *size,
            *step,
            *margin,
            *self.out,
        )

    def worked(self, name: str, channels: int, length: int, places: Sequence[Place]) -> Instruction:
        """An instruction over tiles of `length` windows, `channels` of theirs at a time."""
        length = max(STEP, min(LONG, length // STEP * STEP))
        channels = max(1, min(self.channels, channels))
        framed = self.padded or name == "convolution_inputs"
        frames = min(self.batch, (length - 1) // self.area + 2) if framed else 0
        values = (channels * self.size + self.kernels) * (length + MARGIN)
        values += frames * self.frame + MARGIN + self.kernels * self.depth
        operands = (*self.operands, length, channels, frames, Place(SCRATCH), *places)
        return Instruction(name, operands, values)


def _convolution(call: Call, kinds: Kinds) -> list[Instruction]:
    image, weight, bias, *rest = call.arguments
    windows = _Windows(call, kinds, image, weight, rest)
    places = [solid(ref, kinds) for ref in (output(call), image, weight, bias)]
    return [windows.worked("convolution", windows.channels, COLUMNS // windows.depth, places)]


def _convolution_backward(call: Call, kinds: Kinds) -> list[Instruction]:
    gradient, image, weight, _, *rest, wanted = call.arguments
    windows = _Windows(call, kinds, image, weight, rest)
    by_image, by_weight, by_bias = (
        ref if want else None for ref, want in zip(call.outputs, wanted, strict=True)
    )
    g, x, w = (solid(ref, kinds) for ref in (gradient, image, weight))
    found: list[Instruction] = []
    if by_bias:
        shape = kinds[gradient].shape
        summed = [d for d in range(len(shape)) if d != 1]
        stride = tuple(int(d == 1) for d in range(len(shape)))
        found.append(
            sum_over(View(solid(by_bias, kinds), stride), whole(gradient, kinds[gradient]), shape, summed)
        )
    if by_weight:
        places = (solid(by_weight, kinds), g, x)
        found.append(windows.worked("convolution_weights", COLUMNS // (windows.size * LONG), LONG, places))
    if by_image:
        places = (solid(by_image, kinds), g, w)
        found.append(windows.worked("convolution_inputs", ROWS // windows.size, SHORT, places))
    return found


def _pooled(call: Call, kinds: Kinds, image: Ref, out: Ref, geometry: Sequence[Any]) -> tuple[int, ...]:
    """The sizes of kernels_pooling.h: kernel, stride and padding are in `geometry`."""
    size, stride, padding = (_pair(part) if part else () for part in geometry)
    shape, made = kinds[image].shape, kinds[out].shape
    if len(shape) not in (3, 4):
        raise Unsuitable("it is not over images")
    batch = shape[0] if len(shape) == 4 else 1
    return (batch, *shape[-3:], shape[-3], *size, *(stride or size), *padding, *made[-2:])


def _filled(size_and_more: Sequence[Any], defaults: Sequence[Any]) -> list[Any]:
    """A size and what follows it, with defaults for what was left out."""
    return [*size_and_more, *defaults[len(size_and_more) - 1 :]]


def _max_pool(call: Call, kinds: Kinds) -> list[Instruction]:
    image, *rest = call.arguments
    size, stride, padding, dilation, ceiling = _filled(rest, ([], [0, 0], [1, 1], False))
    if any(d != 1 for d in _pair(dilation)) or ceiling or call.outputs[1] is not None:
        raise Unsuitable("it is dilated, rounds up, or somebody looks at its indices")
    sizes = _pooled(call, kinds, image, output(call), (size, stride, padding))
    return [Instruction("max_pool", (*sizes, solid(output(call), kinds), solid(image, kinds)))]


def _max_pool_backward(call: Call, kinds: Kinds) -> list[Instruction]:
    gradient, image, size, stride, padding, dilation, ceiling, indices = call.arguments
    if any(d != 1 for d in _pair(dilation)) or ceiling or indices is not None:
        raise Unsuitable("it is dilated, rounds up, or somebody looks at its indices")
    sizes = _pooled(call, kinds, image, gradient, (size, stride, padding))
    places = [solid(ref, kinds) for ref in (output(call), gradient, image)]
    return [Instruction("max_pool_backward", (*sizes, *places))]


def _average_pool(call: Call, kinds: Kinds) -> list[Instruction]:
    backward = call.operator is aten.avg_pool2d_backward.default
    gradient, (image, *rest) = (call.arguments[0], call.arguments[1:]) if backward else (None, call.arguments)
    size, stride, padding, ceiling, _, divisor = _filled(rest, ([], [0, 0], False, True, None))
    if any(_pair(padding)) or ceiling or divisor is not None:
        raise Unsuitable("it is padded, rounds up, or divides by something else")
    sizes = _pooled(call, kinds, image, gradient or output(call), (size, stride, padding))
    places = (solid(output(call), kinds), solid(gradient or image, kinds))
    return [Instruction("average_pool_backward" if backward else "average_pool", (*sizes, *places))]


def without_indices(
    calls: Sequence[Call],
    results: Sequence[Ref | None],
    lowered: Callable[[Call], Sequence[Instruction] | None],
) -> list[Call]:
    """The calls, less the indices that max-pooling keeps for its backward where the kernels do both.

    They find the largest value of a window again, as torch would.
    """
    pooling, backward = aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices_backward.default
    changed: dict[int, Call] = {}
    for number, call in enumerate(calls):
        if call.operator is not pooling or call.outputs[1] is None:
            continue
        indices = call.outputs[1]
        readers = [n for n, other in enumerate(calls) if indices in other.reads]
        if indices in results or any(calls[n].operator is not backward for n in readers):
            continue
        without = {number: Call(pooling, call.arguments, call.options, (call.outputs[0], None))}
        for n in readers:
            other = calls[n]
            without[n] = Call(backward, (*other.arguments[:-1], None), other.options, other.outputs)
        if all(lowered(other) for other in without.values()):
            changed |= without
    return [changed.get(number, call) for number, call in enumerate(calls)]


IMAGES: Mapping[Operator, Lowering] = {
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten.max_pool2d_with_indices.default: _max_pool,
    aten.max_pool2d_with_indices_backward.default: _max_pool_backward,
    aten.avg_pool2d.default: _average_pool,
    aten.avg_pool2d_backward.default: _average_pool,
}
