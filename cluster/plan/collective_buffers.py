"""What FSDP2's collectives hold at once: gathered weights, what is reduced, and the copies that gloo makes.

In a backward pass a block's weights are there, the next block's are on their way, and the block before waits
in the buffer that its gradients were reduced from. gloo gathers into a flat copy of its own and reduces a
clone of what it is given; NCCL works on the buffers themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from roundtable.cluster.parallel.strategy import Strategy


@dataclass(frozen=True)
class Buffers:
    """Bytes on a rank.

    `beside` is gathered when a backward pass begins and while a block computes, `arriving` the same at the
    moment when the next block's weights arrive. `reducing` is there while the gradients of a block are
    reduced, `between` when the next block's weights arrive after that; `ending` while those of the rest are.
    `block` is one block's part of a reduction, for what checkpointing computes again beside it.
    """

    beside: float = 0.0
    arriving: float = 0.0
    reducing: float = 0.0
    between: float = 0.0
    ending: float = 0.0
    block: float = 0.0

    @property
    def most(self) -> float:
        """The largest of them."""
        return max(self.beside, self.arriving, self.reducing, self.between, self.ending)


def shards_weights(strategy: Strategy) -> bool:
    """Whether weights lie in shards and are gathered to be used."""
    return strategy.data_parallel in ("zero2", "zero3")


def buffers_of(
    strategy: Strategy, groups: Mapping[str, float], after: float, shards: int, gloo: bool
) -> Buffers:
    """For weights gathered in `groups`: each block's bytes, and under "" the rest's.

    `after` is what of the rest follows the blocks: its gradients are there before any block's.
    """
    if not shards_weights(strategy):
        return Buffers()
    root = groups[""]
    sizes = [size for key, size in groups.items() if key]
    largest, several = max(sizes, default=0.0), len(sizes) > 1
    # Weights and gradients are in bfloat16, and are reduced in float32.
    half = 0.5 if strategy.half is not None else 1.0
    copies = 2.0 if gloo else 1.0 + half
    flat = half * largest if gloo else 0.0
    if strategy.data_parallel == "zero2" or strategy.mesh.pp > 1:
        there = half * (sum(sizes) + root)
        gathered, coming, flat = there, 0.0, 0.0
    else:
        coming = half * largest if several else 0.0
        there, gathered = half * root, half * (root + largest) + coming
    waits = largest if len(sizes) > 2 else 0.0
    reducing = there + half * after + coming + copies * largest + largest / shards
    return Buffers(
        beside=gathered,
        arriving=gathered + flat,
        reducing=reducing,
        between=gathered + flat + half * after + waits,
        ending=there + copies * root + root / shards,
        block=there + coming + copies * largest,
    )
