"""What a step keeps for its backward pass on one rank, and what it needs beside that while it runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from roundtable.cluster.parallel.anatomy import Anatomy
from roundtable.cluster.parallel.checkpointing import run_length
from roundtable.cluster.parallel.forward_trace import Kept, Trace
from roundtable.cluster.parallel.strategy import Strategy
from roundtable.cluster.parallel.tensor_parallel import TensorParallel


@dataclass(frozen=True)
class Activations:
    """Bytes on a rank.

    `kept` is for all micro-batches under way at once, `constant` what does not grow with them: weights in
    another precision, a pipeline's buffers. `first` is the first block's part of `kept`, `again` the most
    that checkpointing computes again at once, `block` the largest temporaries in a block's backward pass and
    `head` those at its beginning.
    """

    kept: float
    constant: float
    first: float
    again: float
    block: float
    head: float

    @property
    def working(self) -> float:
        """The largest temporaries."""
        return max(self.head, self.block) + self.again


@dataclass
class KeptSums:
    """Bytes of one unit: `kept` for the backward pass, the `largest` of it, `weights`' copies, `products`."""

    kept: float = 0.0
    largest: float = 0.0
    weights: float = 0.0
    products: float = 0.0


@dataclass(frozen=True)
class Pass:
    """A model's traced pass under a strategy: turns the sizes of traced tensors into bytes on a rank."""

    anatomy: Anatomy
    trace: Trace
    tensor_parallel: TensorParallel
    strategy: Strategy
    known: dict[Any, Any] = field(default_factory=dict)
    crowding: Mapping[str, float] = field(default_factory=dict)

    @property
    def scale(self) -> float:
        """Micro-batches for each traced batch."""
        return self.strategy.micro_batch / self.trace.examples

    def sums(self) -> dict[str | None, KeptSums]:
        """What each unit keeps on a rank of one traced batch; under None what lies in no unit."""
        mesh = self.strategy.mesh
        key = id(self.trace), mesh.tp, mesh.ep > 1, self.strategy.sequence_parallel
        if key not in self.known:
            table: dict[str | None, KeptSums] = {}
            for kept in self.trace.kept:
                sums = table.setdefault(self.anatomy.unit_of(kept.name), KeptSums())
                size = kept.bytes / self.divisor(kept.name, weight=kept.weight)
                if mesh.ep > 1 and not kept.weight:
                    # A rank with few experts may get more than its share of the tokens.
                    size *= self.crowding.get(kept.name, 1.0)
                if kept.weight:
                    sums.weights += size
                else:
                    sums.kept += size
                    sums.largest = max(sums.largest, size)
            for kept in self.trace.products:
                table.setdefault(self.anatomy.unit_of(kept.name), KeptSums()).products += self.product(kept)
            self.known[key] = table
        found: dict[str | None, KeptSums] = self.known[key]
        return found

    def product(self, kept: Kept) -> float:
        """Bytes of a product on a rank: that of a row is whole before it is summed over the ranks."""
        row = self.tensor_parallel.styles.get(kept.name) == "row"
        column = self.tensor_parallel.styles.get(kept.name) == "column"
        share = 1 if row else self.strategy.mesh.tp if column else self.divisor(kept.name)
        return kept.bytes / share

    def divisor(self, name: str, *, weight: bool = False) -> int:
        """How many ranks share what this module keeps."""
        plan, degree = self.tensor_parallel, self.strategy.mesh.tp
        style = plan.styles.get(name)
        if weight:
            return degree if style is not None else 1
        if degree == 1 or self.anatomy.unit_of(name) not in self.anatomy.blocks or style == "column":
            return 1
        inside = name in plan.inner or style == "row"
        return degree if inside or self.strategy.sequence_parallel else 1

    def passed(self) -> float:
        """Bytes that one block hands to the next, for one micro-batch."""
        blocks = set(self.anatomy.blocks)
        shape = next((call.output for call in self.trace.calls if call.name in blocks and call.output), None)
        if shape is None:
            return 0.0
        half = self.strategy.half is not None and self.strategy.data_parallel in ("zero2", "zero3")
        item = 2 if half else self.anatomy.weights[0].itemsize
        return (
            prod(shape)
            * item
            * self.scale
            / (self.strategy.mesh.tp if self.strategy.sequence_parallel else 1)
        )


def activations(one: Pass, units: Sequence[str], rank: int, count: int) -> Activations:
    """The activations of pipeline rank `rank`, which holds `units`; `count` micro-batches make a step."""
    strategy, anatomy = one.strategy, one.anatomy
    among = set(units)
    here = [block for block in anatomy.blocks if strategy.mesh.pp == 1 or block in among]
    last = rank == strategy.mesh.pp - 1
    sums, inside = one.sums(), set(here)
    names: Iterable[str | None] = [*units, None] if last else units
    mine = {name: sums[name] for name in (sums if strategy.mesh.pp == 1 else names) if name in sums}
    scale = one.scale
    whole = {block: mine[block].kept * scale if block in mine else 0.0 for block in here}
    products = {block: mine[block].products * scale if block in mine else 0.0 for block in here}
    rest = sum(each.kept for name, each in mine.items() if name not in inside) * scale
    outside = (each.largest * scale for name, each in mine.items() if name not in inside)
    by_block, again = _checkpointed(one, here, whole, products)
    under_way = _under_way(strategy, rank, count)
    # Gradients of the logits and of their logarithms.
    head = 2.0 * one.trace.output * one.scale if last else 0.0
    widest = mine[here[0]].largest * one.scale if here and here[0] in mine else 0.0
    return Activations(
        kept=(sum(by_block.values()) + rest) * under_way,
        constant=sum(each.weights for each in mine.values()) + _buffers(one, last, rank, count),
        first=by_block[here[0]] if here else 0.0,
        again=again,
        block=2.0 * widest,
        head=max(head, max(outside, default=0.0)),
    )


def _checkpointed(
    one: Pass, here: Sequence[str], whole: dict[str, float], products: dict[str, float]
) -> tuple[dict[str, float], float]:
    """(what each block keeps, the most that is computed again at once)."""
    strategy, passed = one.strategy, one.passed()
    if strategy.checkpointing == "none" or not here:
        return whole, 0.0
    if strategy.checkpointing == "sqrt":
        length = run_length(len(here) // strategy.virtual_stages)
        runs = [here[first : first + length] for first in range(0, len(here), length)]
        kept = {block: passed if block == run[0] else 0.0 for run in runs for block in run}
        return kept, max(sum(whole[block] for block in run) for run in runs)
    chosen = strategy.checkpointed(here)
    if not chosen:
        return whole, 0.0
    if strategy.checkpointing == "every":
        return whole | dict.fromkeys(chosen, passed), max(whole[block] for block in chosen)
    kept = whole | {block: products[block] + passed for block in chosen}
    return kept, max(max(0.0, whole[block] - products[block]) for block in chosen)


def _under_way(strategy: Strategy, rank: int, count: int) -> float:
    """Micro-batches whose activations a rank holds at once."""
    stages = strategy.mesh.pp
    if stages == 1:
        return 1.0
    count = max(count, stages)
    if strategy.schedule in ("gpipe", "looped_bfs"):
        # All forward passes before any backward one (Lamy-Poirier 2023: breadth first).
        return count
    if strategy.schedule == "1f1b":
        return min(stages - rank, count)
    # Narayanan et al. 2021, section 2.2: the warm-up's chunks, each one of a rank's virtual stages.
    chunks = 2 * (stages - rank - 1) + (strategy.virtual_stages - 1) * stages + 1
    return min(chunks, count * strategy.virtual_stages) / strategy.virtual_stages


def _buffers(one: Pass, last: bool, rank: int, count: int) -> float:
    """Bytes of a pipeline's receive buffers, one for each micro-batch.

    The last stage's outputs are not kept: the schedule is not asked for them.
    """
    strategy = one.strategy
    if strategy.mesh.pp == 1:
        return 0.0
    count, chunks = max(count, strategy.mesh.pp), strategy.virtual_stages
    waiting = max(0.0, count - _under_way(strategy, rank, count))
    inputs = waiting * (chunks if rank else chunks - 1)
    gradients = count * (chunks - 1 if last else chunks)
    return (inputs + gradients) * one.passed()
