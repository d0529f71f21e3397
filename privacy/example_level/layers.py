"""The rules of book-keeping: what a layer's input and the gradient of its output say of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from roundtable.privacy.example_level.parameter_gradients import (
    INSTANTIATE_LIMIT,
    Each,
    Lookup,
    ParameterGradient,
    Product,
    lengths,
    rounding,
    row_squares,
)


class Use(NamedTuple):
    """One use of a parameter in a forward pass; of `rows` of it, from the first up to the second."""

    parameter: nn.Parameter
    gradient: ParameterGradient
    rows: tuple[int, int] | None = None


Rule = Callable[[Any, Tensor, Tensor], Iterator[Use]]


def linear(module: nn.Linear, inputs: Tensor, outputs: Tensor) -> Iterator[Use]:
    """A linear layer over `[B, in]`, `[B, T, in]` or more dimensions."""
    return matrix(module.weight, module.bias, inputs, outputs)


def matrix(
    weight: object, bias: object, inputs: Tensor, outputs: Tensor, rows: tuple[int, int] | None = None
) -> Iterator[Use]:
    """A product with the rows of a weight, plus those of a bias."""
    if trainable(weight):
        yield Use(weight, Product(inputs, outputs), rows)
    if trainable(bias):
        positions = tuple(range(1, outputs.dim() - 1))
        yield Use(bias, Each(outputs.sum(positions) if positions else outputs), rows)


class _Patches:
    """A convolution's weight: a product over the patches of its input; groups are independent products."""

    def __init__(self, module: nn.Conv1d | nn.Conv2d, inputs: Tensor, outputs: Tensor) -> None:
        self._groups = module.groups
        self._outputs = outputs
        self._patches = _patches(module, inputs)
        self._each: Tensor | None = None

    def squared_norms(self) -> Tensor:
        a, g = self._grouped()
        batch, length, width, height = self._outputs.shape[0], a.shape[2], a.shape[1], g.shape[1]
        size = len(a) * width * height * a.element_size()
        if size <= INSTANTIATE_LIMIT or length * length >= width * height:
            self._each = torch.bmm(g, a.transpose(1, 2)).view(batch, -1)
            return row_squares(self._each)
        gram = torch.bmm(a.transpose(1, 2), a).mul_(torch.bmm(g.transpose(1, 2), g)).sum((1, 2))
        reach = (lengths(a.transpose(1, 2)) * lengths(g.transpose(1, 2))).sum(1)
        return (gram + rounding(reach)).view(batch, -1).sum(1)

    def _grouped(self) -> tuple[Tensor, Tensor]:
        count = self._outputs.shape[0] * self._groups
        a = self._patches.reshape(count, -1, self._patches.shape[2])
        return a, self._outputs.reshape(count, -1, self._outputs.shape[2])

    def add_to(self, total: Tensor, factors: Tensor) -> None:
        if self._each is not None:
            total.view(-1).addmv_(self._each.t(), factors)
            return
        a, g = self._grouped()
        repeated = factors.repeat_interleave(self._groups).view(-1, 1, 1)
        shape = (factors.shape[0], self._groups, g.shape[1], a.shape[1])
        total.add_(torch.bmm(g * repeated, a.transpose(1, 2)).view(shape).sum(0).view_as(total))


def convolution(module: nn.Conv1d | nn.Conv2d, inputs: Tensor, outputs: Tensor) -> Iterator[Use]:
    """A convolution over `[B, C, L]` or `[B, C, H, W]`."""
    outputs = outputs.flatten(2)
    if trainable(module.weight):
        yield Use(module.weight, _Patches(module, inputs, outputs))
    if trainable(module.bias):
        yield Use(module.bias, Each(outputs.sum(2)))


def _patches(module: nn.Conv1d | nn.Conv2d, inputs: Tensor) -> Tensor:
    """`[B, C · kernel, positions]`, in the order of the weight's entries."""
    kernel, stride, dilation = module.kernel_size, module.stride, module.dilation
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    if any(sides := module._reversed_padding_repeated_twice):
        inputs = F.pad(inputs, sides, mode=mode)
    if any(step != 1 for step in dilation):
        return _dilated_patches(inputs, kernel, stride, dilation)
    # A strided view copied once: four times as fast as F.unfold on a CPU.
    for axis, (size, step) in enumerate(zip(kernel, stride, strict=True), start=2):
        inputs = inputs.unfold(axis, size, step)
    axes = len(kernel)
    order = (0, 1, *range(2 + axes, 2 + 2 * axes), *range(2, 2 + axes))
    return inputs.permute(order).flatten(2 + axes).flatten(1, 1 + axes)


def _dilated_patches(
    inputs: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]
) -> Tensor:
    if len(kernel) == 1:
        inputs = inputs.unsqueeze(2)
        kernel, stride, dilation = (1, *kernel), (1, *stride), (1, *dilation)
    return F.unfold(inputs, kernel, dilation=dilation, stride=stride)


def embedding(module: nn.Embedding, inputs: Tensor, outputs: Tensor) -> Iterator[Use]:
    """An embedding of indices `[B, …]`."""
    index = inputs.unsqueeze(1) if inputs.dim() == 1 else inputs.flatten(1)
    gradient = outputs.reshape(*index.shape, -1)
    if module.padding_idx is not None:
        gradient = gradient * (index != module.padding_idx).unsqueeze(2)
    if trainable(module.weight):
        yield Use(module.weight, Lookup(index, gradient))


def group_norm(module: nn.GroupNorm, inputs: Tensor, outputs: Tensor) -> Iterator[Use]:
    """Group normalisation over `[B, C, …]`."""
    normal = F.group_norm(inputs, module.num_groups, None, None, module.eps)
    shape = (*outputs.shape[:2], -1)
    return _scale(module, (outputs * normal).reshape(shape).sum(2), outputs.reshape(shape).sum(2))


def layer_norm(module: nn.LayerNorm, inputs: Tensor, outputs: Tensor) -> Iterator[Use]:
    """Layer normalisation over the trailing dimensions."""
    normal = F.layer_norm(inputs, module.normalized_shape, None, None, module.eps)
    return _scale(module, *_over_positions(outputs, normal, len(module.normalized_shape)))


def rms_norm(module: nn.RMSNorm, inputs: Tensor, outputs: Tensor) -> Iterator[Use]:
    """Root-mean-square normalisation over the trailing dimensions."""
    normal = F.rms_norm(inputs, module.normalized_shape, None, module.eps)
    return _scale(module, *_over_positions(outputs, normal, len(module.normalized_shape)))


def _scale(module: nn.Module, scale: Tensor, shift: Tensor) -> Iterator[Use]:
    """Per-example gradients of a scale and a shift are as small as the layer's output is wide."""
    for parameter, each in ((module.weight, scale), (getattr(module, "bias", None), shift)):
        if trainable(parameter):
            yield Use(parameter, Each(each))


def _over_positions(outputs: Tensor, normal: Tensor, trailing: int) -> tuple[Tensor, Tensor]:
    between = tuple(range(1, outputs.dim() - trailing))
    scale = outputs * normal
    return (scale.sum(between), outputs.sum(between)) if between else (scale, outputs)


def trainable(tensor: object) -> TypeGuard[nn.Parameter]:
    """Whether it is a parameter that learns."""
    return isinstance(tensor, nn.Parameter) and tensor.requires_grad


RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: linear,
    nn.modules.linear.NonDynamicallyQuantizableLinear: linear,
    nn.Conv1d: convolution,
    nn.Conv2d: convolution,
    nn.Embedding: embedding,
    nn.GroupNorm: group_norm,
    nn.LayerNorm: layer_norm,
    nn.RMSNorm: rms_norm,
}
# Layers over `[…, width]` mean the same if the positions come first and the batch second.
POSITIONS_MAY_LEAD = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm)
