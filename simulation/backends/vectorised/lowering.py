"""Which of torch's operations the compiled kernels do, and how: one small function for each kind.

Each takes a recorded call and the kinds of all values, and returns instructions; it raises Unsuitable for
what the kernels cannot do, or not well, and torch then does it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from roundtable.simulation.backends.vectorised.instructions import (
    NOWHERE,
    Instruction,
    Kinds,
    Lowering,
    Number,
    Place,
    Unsuitable,
    View,
    map_over,
    output,
    over,
    product,
    solid,
    sum_over,
    whole,
)
from roundtable.simulation.backends.vectorised.lowering_images import IMAGES
from roundtable.simulation.backends.vectorised.recording import Call, Operator, Ref

aten = torch.ops.aten


def lower(call: Call, kinds: Kinds) -> Sequence[Instruction] | None:
    """Instructions that do what the call does; None if torch has to."""
    lowering = _LOWERINGS.get(call.operator)
    if lowering is None:
        return None
    # Labels and indices are the only whole numbers that kernels read, and they say so themselves.
    indexed = {ref for ref in call.reads if kinds[ref].dtype == torch.int64}
    if indexed and call.operator not in _INDEXED:
        return None
    refs = [*call.reads, *(ref for ref in call.outputs if ref)]
    if any(kinds[ref].dtype != torch.float32 for ref in refs if ref not in indexed):
        return None
    if any(kinds[ref].size == 0 for ref in refs) or any(not kinds[ref].contiguous for ref in indexed):
        return None
    try:
        return lowering(call, kinds)
    except Unsuitable:
        return None


def _arguments(call: Call, defaults: Sequence[Any] = ()) -> list[Any]:
    """Positional arguments, and the last of `defaults` for those that were left out."""
    given = list(call.arguments)
    return given + list(defaults[len(defaults) - max(0, len(defaults) - len(given)) :])


def mapping(name: str, numbers: Callable[..., Sequence[float]] = lambda *rest: ()) -> Lowering:
    """A function of the call's tensors, in their order; `numbers` makes its numbers of the rest."""

    def lowering(call: Call, kinds: Kinds) -> list[Instruction]:
        if call.options:
            raise Unsuitable("it has options")
        out = output(call)
        shape = kinds[out].shape
        tensors = [value for value in call.arguments if isinstance(value, Ref)]
        rest = [value for value in call.arguments if not isinstance(value, Ref)]
        views = [over(ref, kinds[ref], shape) for ref in tensors]
        return [map_over(name, shape, whole(out, kinds[out]), views, numbers(*rest))]

    return lowering


def _binary(name: str, scalar: Callable[[float], tuple[str, float]], sign: float = 1.0) -> Lowering:
    """Of two tensors, or of a tensor and a number that `scalar` turns into another function's number."""

    def lowering(call: Call, kinds: Kinds) -> list[Instruction]:
        out, (left, right) = output(call), call.arguments[:2]
        alpha = float((call.arguments[2:] or (call.options.get("alpha", 1.0),))[0])
        shape, target = kinds[out].shape, whole(out, kinds[out])
        if not isinstance(left, Ref):
            raise Unsuitable("a number stands on its left")
        first = over(left, kinds[left], shape)
        if isinstance(right, Ref):
            return [map_over(name, shape, target, [first, over(right, kinds[right], shape)], [sign * alpha])]
        other, number = scalar(alpha * float(right))
        return [map_over(other, shape, target, [first], [number])]

    return lowering


def _gelu(suffix: str) -> Lowering:
    def lowering(call: Call, kinds: Kinds) -> Sequence[Instruction]:
        style = "_tanh" if call.options.get("approximate", "none") == "tanh" else ""
        plain = Call(call.operator, call.arguments, {}, call.outputs)
        return mapping(f"gelu{style}{suffix}")(plain, kinds)

    return lowering


def _from_input(name: str, numbers: Callable[..., Sequence[float]]) -> Lowering:
    """A backward function whose last argument says whether it gets the result instead of the input."""

    def lowering(call: Call, kinds: Kinds) -> Sequence[Instruction]:
        if any(value is True for value in call.arguments):
            raise Unsuitable("it works on the result")
        return mapping(name, numbers)(call, kinds)

    return lowering


def _power(call: Call, kinds: Kinds) -> Sequence[Instruction]:
    if call.arguments[1] != 2:
        raise Unsuitable("only squares")
    return mapping("square")(call, kinds)


def _fill(value: float) -> Lowering:
    def lowering(call: Call, kinds: Kinds) -> list[Instruction]:
        out = output(call)
        return [map_over("fill", kinds[out].shape, whole(out, kinds[out]), [], [value])]

    return lowering


def _sum(call: Call, kinds: Kinds) -> list[Instruction]:
    """Sums and means, over some dimensions or all."""
    source, dims = _arguments(call, (None, None))[:2]
    out, kind = output(call), kinds[source]
    rank = len(kind.shape)
    summed = sorted({d % rank for d in dims}) if dims else list(range(rank))
    if not rank:
        raise Unsuitable("there is nothing to sum")
    steps = list(kinds[out].stride)
    kept = len(kinds[out].shape) == rank
    stride = [0 if d in summed else (steps[d] if kept else steps.pop(0)) for d in range(rank)]
    total = sum_over(View(Place(out), tuple(stride)), whole(source, kind), kind.shape, summed)
    if call.operator not in (aten.mean.dim, aten.mean.default):
        return [total]
    return [total, _scaled(out, kinds, kinds[out].size / kind.size)]


def _copy_into(call: Call, kinds: Kinds) -> list[Instruction]:
    target, source = call.arguments[:2]
    kind = kinds[target]
    return [map_over("copy", kind.shape, whole(target, kind), [over(source, kinds[source], kind.shape)])]


def _scaled(ref: Ref, kinds: Kinds, factor: float) -> Instruction:
    view = whole(ref, kinds[ref])
    return map_over("scale", kinds[ref].shape, view, [view], [factor])


def _select_backward(call: Call, kinds: Kinds) -> list[Instruction]:
    """A gradient in its place among zeros."""
    gradient, _, dim, index = call.arguments
    out = output(call)
    kind = kinds[out]
    dim %= len(kind.shape)
    place = Place(out, (index % kind.shape[dim]) * kind.stride[dim])
    stride = tuple(step for d, step in enumerate(kind.stride) if d != dim)
    shape = kinds[gradient].shape
    zeros = map_over("fill", kind.shape, whole(out, kind), [], [0.0])
    return [zeros, map_over("copy", shape, View(place, stride), [whole(gradient, kinds[gradient])])]


def _matrices(ref: Ref, kinds: Kinds) -> tuple[Place, tuple[int, ...], tuple[int, ...]]:
    """A matrix, or several, as `product` takes them."""
    kind = kinds[ref]
    if len(kind.shape) == 3:
        return Place(ref), kind.shape, kind.stride
    return Place(ref), (1, *kind.shape), (0, *kind.stride)


def _product(call: Call, kinds: Kinds) -> list[Instruction]:
    """mm and bmm."""
    left, right = call.arguments
    place, _, stride = _matrices(output(call), kinds)
    return [product((place, stride), _matrices(left, kinds), _matrices(right, kinds))]


def _product_and_bias(call: Call, kinds: Kinds) -> list[Instruction]:
    bias, left, right = call.arguments
    out = output(call)
    added = over(bias, kinds[bias], kinds[out].shape)
    if added.stride[1] != 1 and kinds[out].shape[1] != 1:
        raise Unsuitable("its bias does not lie along the columns")
    place, _, stride = _matrices(out, kinds)
    numbers = (float(call.options.get("alpha", 1.0)), float(call.options.get("beta", 1.0)), 0.0)
    extras = ((added.place, added.stride[0]), (NOWHERE, 0))
    return [product((place, stride), _matrices(left, kinds), _matrices(right, kinds), numbers, extras)]


def _last(ref: Ref, dim: int, kinds: Kinds) -> tuple[int, int]:
    """Rows and their length, where `dim` is the last dimension."""
    shape = kinds[ref].shape
    if not shape or dim % len(shape) != len(shape) - 1:
        raise Unsuitable("it is not over the last dimension")
    return kinds[ref].size // shape[-1], shape[-1]


def _softmax(call: Call, kinds: Kinds) -> list[Instruction]:
    source, dim, _ = call.arguments
    logarithm = int(call.operator is aten._log_softmax.default)
    places = (solid(output(call), kinds), solid(source, kinds))
    return [Instruction("softmax", (*_last(source, dim, kinds), logarithm, *places))]


def _softmax_backward(call: Call, kinds: Kinds) -> list[Instruction]:
    gradient, result, dim, _ = call.arguments
    logarithm = int(call.operator is aten._log_softmax_backward_data.default)
    places = [solid(ref, kinds) for ref in (output(call), gradient, result)]
    return [Instruction("softmax_backward", (*_last(result, dim, kinds), logarithm, *places))]


def _nll(call: Call, kinds: Kinds) -> list[Instruction]:
    backward = call.operator is aten.nll_loss_backward.default
    gradient, (source, label, weight, reduction, ignored) = None, call.arguments[:5]
    counted = None
    if backward:
        gradient, source, label, weight, reduction, ignored, counted = call.arguments
    if weight is not None or reduction == 0 or len(kinds[source].shape) != 2:
        raise Unsuitable("it has weights, or no reduction")
    rows, n = kinds[source].shape
    scalar = counted if backward else output(call, 1)
    value = gradient if backward else source
    places = [solid(ref, kinds) for ref in (label, output(call), scalar, value)]
    name = "nll_backward" if backward else "nll"
    return [Instruction(name, (rows, n, ignored, int(reduction == 1), *places))]


def _layer_norm(call: Call, kinds: Kinds) -> list[Instruction]:
    source, shape, weight, bias, epsilon = call.arguments
    n = kinds[weight].size if weight else _length(shape)
    x, w, m, r, b, y = (
        solid(ref, kinds) for ref in (source, weight, output(call, 1), output(call, 2), bias, output(call))
    )
    return [Instruction("layer_norm", (kinds[source].size // n, n, x, w, m, r, Number(epsilon), b, y))]


def _layer_norm_backward(call: Call, kinds: Kinds) -> list[Instruction]:
    gradient, source, shape, mean, inverse, weight, _, _ = call.arguments
    n = _length(shape)
    refs = (source, weight, mean, inverse, gradient, *call.outputs)
    places = [solid(ref, kinds) for ref in refs]
    return [Instruction("layer_norm_backward", (kinds[source].size // n, n, *places))]


def _length(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())


def _group_norm(call: Call, kinds: Kinds) -> list[Instruction]:
    source, weight, bias, *sizes, epsilon = call.arguments
    x, w, m, r, b, y = (
        solid(ref, kinds) for ref in (source, weight, output(call, 1), output(call, 2), bias, output(call))
    )
    return [Instruction("group_norm", (*sizes, x, w, m, r, Number(epsilon), b, y))]


def _group_norm_backward(call: Call, kinds: Kinds) -> list[Instruction]:
    gradient, source, mean, inverse, weight, *sizes, _ = call.arguments
    refs = (source, weight, mean, inverse, gradient, *call.outputs)
    return [Instruction("group_norm_backward", (*sizes, *(solid(ref, kinds) for ref in refs)))]


def _embedding(call: Call, kinds: Kinds) -> list[Instruction]:
    table, index = call.arguments[:2]
    length, n = kinds[table].shape
    places = [solid(ref, kinds) for ref in (index, table, output(call))]
    return [Instruction("embedding", (kinds[index].size, n, length, *places))]


def scatter(call: Call, kinds: Kinds, target: Place, scale: float | str) -> Instruction:
    """What embedding_dense_backward adds up, added to a table."""
    gradient, index, _, padding, by_frequency = call.arguments
    if by_frequency:
        raise Unsuitable("it is scaled by frequency")
    n = kinds[output(call)].shape[1]
    places = (solid(index, kinds), target, solid(gradient, kinds))
    return Instruction("scatter", (kinds[index].size, n, padding, *places, Number(scale)))


def _embedding_backward(call: Call, kinds: Kinds) -> list[Instruction]:
    out = output(call)
    zeros = Instruction("zero", (kinds[out].size, solid(out, kinds)))
    return [zeros, scatter(call, kinds, Place(out), 1.0)]


def _mse_backward(call: Call, kinds: Kinds) -> list[Instruction]:
    gradient, left, right, reduction = call.arguments
    out = output(call)
    shape = kinds[out].shape
    factor = 2.0 / kinds[left].size if reduction == 1 else 2.0
    views = [over(ref, kinds[ref], shape) for ref in (left, right, gradient)]
    return [map_over("mse_loss_backward", shape, whole(out, kinds[out]), views, [factor])]


def _scale(value: float) -> tuple[str, float]:
    return "scale", value


def _by_slope(slope: float = 0.01, _: bool = False) -> tuple[float, ...]:
    return (float(slope),)


def _bounds(low: float = -1.0, high: float = 1.0) -> tuple[float, ...]:
    return float(low), float(high)


def _elu(alpha: float = 1.0, scale: float = 1.0, inner: float = 1.0, _: bool = False) -> tuple[float, ...]:
    return float(alpha), float(scale), float(inner)


_add = _binary("add", lambda value: ("shift", value))
_sub = _binary("add", lambda value: ("shift", -value), sign=-1.0)
_mul = _binary("multiply", _scale)
_div = _binary("divide", lambda value: _scale(1.0 / value) if value else _scale(float("inf")))

_LOWERINGS: Mapping[Operator, Lowering] = {
    **dict.fromkeys([aten.add.Tensor, aten.add_.Tensor, aten.add.Scalar, aten.add_.Scalar], _add),
    **dict.fromkeys([aten.sub.Tensor, aten.sub_.Tensor, aten.sub.Scalar, aten.sub_.Scalar], _sub),
    **dict.fromkeys([aten.mul.Tensor, aten.mul_.Tensor, aten.mul.Scalar, aten.mul_.Scalar], _mul),
    **dict.fromkeys([aten.div.Tensor, aten.div_.Tensor, aten.div.Scalar, aten.div_.Scalar], _div),
    **dict.fromkeys([aten.sum.dim_IntList, aten.sum.default, aten.mean.dim, aten.mean.default], _sum),
    **dict.fromkeys([aten.mm.default, aten.bmm.default], _product),
    **dict.fromkeys([aten.relu.default, aten.relu_.default], mapping("relu")),
    **dict.fromkeys([aten._softmax.default, aten._log_softmax.default], _softmax),
    **dict.fromkeys(
        [aten._softmax_backward_data.default, aten._log_softmax_backward_data.default], _softmax_backward
    ),
    **dict.fromkeys([aten.nll_loss_forward.default, aten.nll_loss_backward.default], _nll),
    aten.addmm.default: _product_and_bias,
    aten.clone.default: lambda call, kinds: mapping("copy")(
        Call(call.operator, call.arguments, {}, call.outputs), kinds
    ),
    aten.copy_.default: _copy_into,
    aten.ones_like.default: _fill(1.0),
    aten.zeros_like.default: _fill(0.0),
    aten.select_backward.default: _select_backward,
    aten.neg.default: mapping("scale", lambda: (-1.0,)),
    aten.exp.default: mapping("exponential"),
    aten.rsqrt.default: mapping("inverse_root"),
    aten.pow.Tensor_Scalar: _power,
    aten.threshold_backward.default: mapping("threshold_backward", lambda value: (float(value),)),
    aten.tanh.default: mapping("tanh"),
    aten.tanh_backward.default: mapping("tanh_backward"),
    aten.sigmoid.default: mapping("sigmoid"),
    aten.sigmoid_backward.default: mapping("sigmoid_backward"),
    aten.gelu.default: _gelu(""),
    aten.gelu_backward.default: _gelu("_backward"),
    aten.silu.default: mapping("silu"),
    aten.silu_backward.default: mapping("silu_backward"),
    aten.leaky_relu.default: mapping("leaky_relu", _by_slope),
    aten.leaky_relu_backward.default: _from_input("leaky_relu_backward", _by_slope),
    aten.elu.default: mapping("elu", _elu),
    aten.elu_backward.default: _from_input("elu_backward", _elu),
    aten.hardtanh.default: mapping("hardtanh", _bounds),
    aten.hardtanh_backward.default: mapping("hardtanh_backward", _bounds),
    aten.mse_loss_backward.default: _mse_backward,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: _group_norm_backward,
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_backward,
    **IMAGES,
}
_INDEXED = {
    aten.nll_loss_forward.default,
    aten.nll_loss_backward.default,
    aten.embedding.default,
    aten.embedding_dense_backward.default,
}
