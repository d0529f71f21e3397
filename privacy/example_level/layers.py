"""Per-example gradients of one layer from its input a and output gradient g, never all of them at once.

Each kind of layer gives two things (Bu et al. 2023, "Differentially private optimization on large
model at small cost"): the squared norm of every example's gradient, and, once the clip factors c are
known, the sum Σ cᵢ gᵢ over the batch, by one product instead of one gradient for each example.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Above this many bytes of per-example gradients a layer goes without them, whatever the speed.
_INSTANTIATE_LIMIT = 256 << 20
# Reading and writing an instantiated gradient costs about as much as this many multiplications an entry.
_MEMORY_COST = 8


Sums = Mapping[nn.Parameter, Tensor]


class LayerGradient(Protocol):
    """The gradients of one layer in one backward pass."""

    def squared_norms(self) -> Tensor:
        """`[batch]`, over all trainable parameters of the layer."""

    def add_to(self, sums: Sums, factors: Tensor) -> None:
        """Adds Σ factors[i] · (gradient for example i) to the sum of each trainable parameter."""


class _Matrix:
    """A layer that multiplies: example i's weight gradient is Gᵢᵀ Aᵢ, A `[B, T, in]` and G `[B, T, out]`."""

    def __init__(self, module: nn.Linear, inputs: Tensor, outputs: Tensor) -> None:
        self._weight = module.weight if _trainable(module.weight) else None
        self._bias = module.bias if _trainable(module.bias) else None
        self._inputs = inputs
        self._outputs = outputs
        self._each: Tensor | None = None

    def squared_norms(self) -> Tensor:
        a, g = self._inputs, self._outputs
        if a.dim() == 2:
            inputs = _row_squares(a) if self._weight is not None else torch.zeros_like(g[:, 0])
            return _row_squares(g) * (inputs + 1.0 if self._bias is not None else inputs)
        total = torch.zeros_like(g[:, 0, 0]) if self._weight is None else self._weight_norms()
        return total if self._bias is None else total + _row_squares(g.sum(1))

    def _weight_norms(self) -> Tensor:
        a, g = self._inputs, self._outputs
        batch, length, width, height = *a.shape, g.shape[2]
        ghost = length * length * (width + height)
        small = batch * width * height * a.element_size() <= _INSTANTIATE_LIMIT
        if small and ghost > _MEMORY_COST * width * height:
            self._each = torch.bmm(g.transpose(1, 2), a)
            return _row_squares(self._each.flatten(1))
        return (torch.bmm(a, a.transpose(1, 2)) * torch.bmm(g, g.transpose(1, 2))).sum((1, 2))

    def add_to(self, sums: Sums, factors: Tensor) -> None:
        a, g = self._inputs, self._outputs
        scaled = (g * factors.view(-1, *[1] * (g.dim() - 1))).flatten(0, -2)
        if self._weight is not None:
            if self._each is not None:
                sums[self._weight].view(-1).addmv_(self._each.flatten(1).t(), factors)
            else:
                sums[self._weight].addmm_(scaled.t(), a.flatten(0, -2))
        if self._bias is not None:
            sums[self._bias].add_(scaled.sum(0))


def linear(module: nn.Linear, inputs: Tensor, outputs: Tensor) -> LayerGradient:
    """A linear layer over `[B, in]`, `[B, T, in]` or more dimensions."""
    if inputs.dim() > 3:
        inputs, outputs = inputs.flatten(1, -2), outputs.flatten(1, -2)
    return _Matrix(module, inputs, outputs)


class _Convolution:
    """A convolution as a product over the patches of its input; groups are independent products."""

    def __init__(self, module: nn.Conv1d | nn.Conv2d, inputs: Tensor, outputs: Tensor) -> None:
        self._module = module
        self._outputs = outputs.flatten(2)
        self._patches = _patches(module, inputs)
        self._each: Tensor | None = None

    def squared_norms(self) -> Tensor:
        total = torch.zeros(self._outputs.shape[0], dtype=self._outputs.dtype, device=self._outputs.device)
        if self._module.weight.requires_grad:
            a, g = self._grouped()
            length, width, height = a.shape[2], a.shape[1], g.shape[1]
            size = self._module.weight.numel() * self._outputs.shape[0] * a.element_size()
            if size > _INSTANTIATE_LIMIT and length * length < width * height:
                gram = torch.bmm(a.transpose(1, 2), a) * torch.bmm(g.transpose(1, 2), g)
                total += gram.sum((1, 2)).view(self._outputs.shape[0], -1).sum(1)
            else:
                self._each = torch.bmm(g, a.transpose(1, 2)).view(self._outputs.shape[0], -1)
                total += _row_squares(self._each)
        if _trainable(self._module.bias):
            total += _row_squares(self._outputs.sum(2))
        return total

    def _grouped(self) -> tuple[Tensor, Tensor]:
        groups, batch = self._module.groups, self._outputs.shape[0]
        a = self._patches.reshape(batch * groups, -1, self._patches.shape[2])
        return a, self._outputs.reshape(batch * groups, -1, self._outputs.shape[2])

    def add_to(self, sums: Sums, factors: Tensor) -> None:
        module = self._module
        if _trainable(module.weight):
            if self._each is not None:
                sums[module.weight].view(-1).addmv_(self._each.t(), factors)
            else:
                a, g = self._grouped()
                repeated = factors.repeat_interleave(module.groups).view(-1, 1, 1)
                shape = (factors.shape[0], module.groups, g.shape[1], a.shape[1])
                total = torch.bmm(g * repeated, a.transpose(1, 2)).view(shape).sum(0)
                sums[module.weight].add_(total.view_as(module.weight))
        if _trainable(module.bias):
            sums[module.bias].add_(factors @ self._outputs.sum(2))


def convolution(module: nn.Conv1d | nn.Conv2d, inputs: Tensor, outputs: Tensor) -> LayerGradient:
    """A convolution over `[B, C, L]` or `[B, C, H, W]`."""
    return _Convolution(module, inputs, outputs)


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


class _Embedding:
    """A table looked up: examples touch few rows, so norms come from pairs of positions with equal index."""

    def __init__(self, module: nn.Embedding, inputs: Tensor, outputs: Tensor) -> None:
        self._module = module
        self._index = inputs.flatten(1)
        gradient = outputs.reshape(*self._index.shape, -1)
        if module.padding_idx is not None:
            gradient = gradient * (self._index != module.padding_idx).unsqueeze(2)
        self._gradient = gradient

    def squared_norms(self) -> Tensor:
        equal = self._index.unsqueeze(2) == self._index.unsqueeze(1)
        products = torch.bmm(self._gradient, self._gradient.transpose(1, 2))
        return products.mul_(equal).sum((1, 2))

    def add_to(self, sums: Sums, factors: Tensor) -> None:
        weight = self._module.weight
        assert isinstance(weight, nn.Parameter)
        scaled = (self._gradient * factors.view(-1, 1, 1)).flatten(0, 1)
        sums[weight].index_add_(0, self._index.flatten(), scaled)


def embedding(module: nn.Embedding, inputs: Tensor, outputs: Tensor) -> LayerGradient:
    """An embedding of indices `[B, …]`."""
    if inputs.dim() == 1:
        inputs, outputs = inputs.unsqueeze(1), outputs.unsqueeze(1)
    return _Embedding(module, inputs, outputs)


class _Scale:
    """A normalisation's scale and shift: per-example gradients are as small as the layer's output is wide."""

    def __init__(self, module: nn.Module, scale: Tensor, shift: Tensor) -> None:
        weight, bias = module.weight, getattr(module, "bias", None)
        self._each = [(p, each) for p, each in ((weight, scale), (bias, shift)) if _trainable(p)]

    def squared_norms(self) -> Tensor:
        return torch.stack([_row_squares(each.flatten(1)) for _, each in self._each]).sum(0)

    def add_to(self, sums: Sums, factors: Tensor) -> None:
        for parameter, each in self._each:
            sums[parameter].add_((factors @ each.flatten(1)).view_as(parameter))


def group_norm(module: nn.GroupNorm, inputs: Tensor, outputs: Tensor) -> LayerGradient:
    """Group normalisation over `[B, C, …]`."""
    normal = F.group_norm(inputs, module.num_groups, None, None, module.eps)
    shape = (*outputs.shape[:2], -1)
    return _Scale(module, (outputs * normal).reshape(shape).sum(2), outputs.reshape(shape).sum(2))


def layer_norm(module: nn.LayerNorm, inputs: Tensor, outputs: Tensor) -> LayerGradient:
    """Layer normalisation over the trailing dimensions."""
    normal = F.layer_norm(inputs, module.normalized_shape, None, None, module.eps)
    return _Scale(module, *_over_positions(outputs, normal, len(module.normalized_shape)))


def rms_norm(module: nn.RMSNorm, inputs: Tensor, outputs: Tensor) -> LayerGradient:
    """Root-mean-square normalisation over the trailing dimensions."""
    normal = F.rms_norm(inputs, module.normalized_shape, None, module.eps)
    return _Scale(module, *_over_positions(outputs, normal, len(module.normalized_shape)))


def _over_positions(outputs: Tensor, normal: Tensor, trailing: int) -> tuple[Tensor, Tensor]:
    between = tuple(range(1, outputs.dim() - trailing))
    scale = outputs * normal
    return (scale.sum(between), outputs.sum(between)) if between else (scale, outputs)


def _row_squares(rows: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return norms.square()


def _trainable(tensor: object) -> TypeGuard[nn.Parameter]:
    return isinstance(tensor, nn.Parameter) and tensor.requires_grad
