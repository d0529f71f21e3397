"""Where the low-rank factors of a model lie in its flat vector, by the names that peft gives them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from roundtable.core.layout import Layout

_DOWN, _UP, _MAGNITUDE = ".lora_A.", ".lora_B.", ".lora_magnitude_vector"


@dataclass(frozen=True)
class FactorPair:
    """Where the factors of one ΔW lie in the flat vector, their shapes, and the names of A and B."""

    names: tuple[str, str]
    down: slice
    up: slice
    rank: int

    @property
    def first(self) -> int:
        """The first place that is one of the pair's."""
        return min(int(self.down.start), int(self.up.start))

    @property
    def end(self) -> int:
        """The place behind its last one."""
        return max(int(self.down.stop), int(self.up.stop))

    def factors(self, values: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """A [n, rank, in] and B [n, out, rank] of rows; `values` [n, …] begin at the place `start`."""
        rows = len(values)
        down = values[:, self.down.start - start : self.down.stop - start]
        up = values[:, self.up.start - start : self.up.stop - start]
        return down.reshape(rows, self.rank, -1), up.reshape(rows, -1, self.rank)


def factor_pairs(layout: Layout) -> tuple[FactorPair, ...]:
    """The pairs of which both factors travel, as peft names them, in the order of their places.

    None for DoRA, whose product is not the whole of what an adapter does.
    """
    specs = {spec.name: spec for spec in layout.averaged if spec.kind == "parameter"}
    if any(_MAGNITUDE in name for name in specs):
        return ()
    found = []
    for name, down in specs.items():
        up = specs.get(name.replace(_DOWN, _UP)) if _DOWN in name else None
        if up is not None and len(down.shape) == len(up.shape) == 2 and down.shape[0] == up.shape[1]:
            places = [slice(each.offset, each.offset + each.size) for each in (down, up)]
            found.append(FactorPair((name, up.name), places[0], places[1], down.shape[0]))
    return tuple(sorted(found, key=lambda pair: pair.first))
