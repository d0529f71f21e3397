"""Per-example gradients of one parameter, never all of them at once where that costs more than it saves.

Each form gives two things (Bu et al. 2023, "Differentially private optimization on large model at small
cost"): the squared norm of every example's gradient, and, once the clip factors c are known, the sum
Σ cᵢ gᵢ over the batch, by one product instead of one gradient for each example. A parameter that is used
several times has the sum of its uses' gradients, and the norm of that sum: `joined` makes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from roundtable.privacy.example_level.per_example_clipping import UnsupportedModel

# Above this many bytes of per-example gradients a parameter goes without them, whatever the speed.
INSTANTIATE_LIMIT = 256 << 20
# Above this many it has them for its norm alone, and not until the clip factors are known: a model has many.
_KEEP_LIMIT = 32 << 20
# Reading and writing an instantiated gradient costs about as much as this many multiplications an entry.
_MEMORY_COST = 8
# Of the sum of the lengths of its terms, squared: what rounding takes from a norm that is a sum of products.
_ROUNDING = 32


class ParameterGradient(Protocol):
    """The gradients of one parameter for every example of a batch."""

    def squared_norms(self) -> Tensor:
        """`[batch]`."""

    def add_to(self, total: Tensor, factors: Tensor) -> None:
        """Adds Σ factors[i] · (gradient for example i) to `total`, which has the parameter's shape."""


class Each:
    """One small gradient for each example, `[B, …]`: a bias, the scale of a normalisation."""

    def __init__(self, gradients: Tensor) -> None:
        self.gradients = gradients.flatten(1)

    def squared_norms(self) -> Tensor:
        return row_squares(self.gradients)

    def add_to(self, total: Tensor, factors: Tensor) -> None:
        total.view(-1).addmv_(self.gradients.t(), factors)


class Product:
    """A matrix that multiplies: example i's gradient is Gᵢᵀ Aᵢ, A `[B, T, in]` and G `[B, T, out]`.

    Its norm is that of the gradient itself, or comes from the two Gram matrices over the positions
    (Li et al. 2022, "ghost clipping", equation 3): whichever costs less.
    """

    def __init__(self, inputs: Tensor, outputs: Tensor) -> None:
        self.inputs = _with_positions(inputs)
        self.outputs = _with_positions(outputs)
        self._each: Tensor | None = None

    def squared_norms(self) -> Tensor:
        a, g = self.inputs, self.outputs
        batch, length, width, height = *a.shape, g.shape[2]
        if length == 1:
            return row_squares(a[:, 0]) * row_squares(g[:, 0])
        ghost = length * length * (width + height)
        size = batch * width * height * a.element_size()
        # What is not kept is computed again, as one sum.
        kept = size <= _KEEP_LIMIT
        single = (_MEMORY_COST if kept else _MEMORY_COST + length) * width * height
        if size <= INSTANTIATE_LIMIT and ghost > single:
            each = torch.bmm(g.transpose(1, 2), a).flatten(1)
            self._each = each if kept else None
            return row_squares(each)
        squares = torch.bmm(a, a.transpose(1, 2)).mul_(torch.bmm(g, g.transpose(1, 2))).sum((1, 2))
        return squares + rounding(self.reach())

    def reach(self) -> Tensor:
        """`[batch]`: the sum over the positions of the lengths of what each adds to the gradient."""
        return (lengths(self.inputs) * lengths(self.outputs)).sum(1)

    def add_to(self, total: Tensor, factors: Tensor) -> None:
        if self._each is not None:
            total.view(-1).addmv_(self._each.t(), factors)
            return
        scaled = (self.outputs * factors.view(-1, 1, 1)).flatten(0, 1)
        total.addmm_(scaled.t(), self.inputs.flatten(0, 1))


class Lookup:
    """A table looked up at `index` `[B, T]`: pairs of positions with equal index make the norm."""

    def __init__(self, index: Tensor, outputs: Tensor) -> None:
        self.index = index
        self.outputs = outputs

    def squared_norms(self) -> Tensor:
        equal = self.index.unsqueeze(2) == self.index.unsqueeze(1)
        products = torch.bmm(self.outputs, self.outputs.transpose(1, 2))
        return products.mul_(equal).sum((1, 2)) + rounding(self.reach())

    def reach(self) -> Tensor:
        """As `Product.reach`."""
        return lengths(self.outputs).sum(1)

    def add_to(self, total: Tensor, factors: Tensor) -> None:
        scaled = (self.outputs * factors.view(-1, 1, 1)).flatten(0, 1)
        total.index_add_(0, self.index.flatten(), scaled)


class Tied:
    """A table that is looked up and multiplies too, as a tied output head does.

    ‖L + P‖² = ‖L‖² + ‖P‖² + 2⟨L, P⟩, and ⟨L, P⟩ is the sum over positions t of the lookup and s of the
    product of G[s, indexₜ] · ⟨A[s], E[t]⟩.
    """

    def __init__(self, lookup: Lookup, product: Product) -> None:
        self._lookup = lookup
        self._product = product

    def squared_norms(self) -> Tensor:
        index, g = self._lookup.index, self._product.outputs
        chosen = g.gather(2, index.unsqueeze(1).expand(-1, g.shape[1], -1))
        cross = torch.bmm(self._product.inputs, self._lookup.outputs.transpose(1, 2)).mul_(chosen)
        squares = self._lookup.squared_norms() + self._product.squared_norms() + 2 * cross.sum((1, 2))
        return squares + rounding(self._lookup.reach() + self._product.reach())

    def add_to(self, total: Tensor, factors: Tensor) -> None:
        self._lookup.add_to(total, factors)
        self._product.add_to(total, factors)


def joined(uses: Sequence[ParameterGradient]) -> ParameterGradient:
    """The gradient of a parameter that has these uses. UnsupportedModel for forms that do not mix."""
    if len(uses) == 1:
        return uses[0]
    products = [use for use in uses if isinstance(use, Product)]
    lookups = [use for use in uses if isinstance(use, Lookup)]
    each = [use for use in uses if isinstance(use, Each)]
    if len(each) == len(uses):
        return Each(torch.stack([use.gradients for use in each]).sum(0))
    if len(products) + len(lookups) < len(uses):
        raise UnsupportedModel("a parameter is used twice, in ways whose gradients have no common norm here")
    product = Product(
        torch.cat([use.inputs for use in products], 1), torch.cat([use.outputs for use in products], 1)
    ) if products else None  # fmt: skip
    lookup = Lookup(
        torch.cat([use.index for use in lookups], 1), torch.cat([use.outputs for use in lookups], 1)
    ) if lookups else None  # fmt: skip
    if product is None or lookup is None:
        return product or lookup or uses[0]
    return Tied(lookup, product)


def rounding(reach: Tensor) -> Tensor:
    """What to add to a squared norm that is a sum of products, so that it is none too small.

    Where the terms cancel, what is left of them may be nothing but rounding. Too small a norm would let
    the example pass unclipped.
    """
    return reach.square() * (_ROUNDING * torch.finfo(reach.dtype).eps)


def lengths(vectors: Tensor) -> Tensor:
    """Euclidean lengths over the last dimension."""
    found: Tensor = torch.linalg.vector_norm(vectors, dim=-1)
    return found


def row_squares(rows: Tensor) -> Tensor:
    """Squared Euclidean lengths over the last dimension."""
    return lengths(rows).square()


def _with_positions(values: Tensor) -> Tensor:
    return values.unsqueeze(1) if values.dim() == 2 else values.flatten(1, -2)
