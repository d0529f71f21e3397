"""Which blocks to compute again so that a step fits: as few as do, as each costs its forward pass.

Those are the first blocks of a stage: what the last ones kept is gone when the backward pass comes to them. A
pipeline's later stages have fewer micro-batches under way (Narayanan et al. 2021, section 2.2.1), and so
compute fewer blocks again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

from roundtable.cluster.parallel.strategy import Strategy
from roundtable.cluster.plan.memory_estimate import Estimate, ModelProbe, estimate_rank, fullest, stages_of


def fewest_blocks(
    probe: ModelProbe, strategy: Strategy, accumulated: int, problem: Callable[[Estimate], str]
) -> Strategy | None:
    """The strategy with the fewest blocks of each stage checkpointed that leave no `problem`.

    None where there is one with all of them checkpointed.
    """
    blocks, ranks = set(probe.anatomy.blocks), stages_of(probe, strategy)
    if not blocks:
        return None

    def fits(rank: int, chosen: tuple[str, ...]) -> bool:
        one = strategy.with_checkpointing("every" if chosen else "none")
        one = replace(one, checkpoint_blocks=chosen)
        return not problem(estimate_rank(probe, one, accumulated, ranks[rank], rank))

    likely = [rank for rank, _ in fullest(probe, strategy)]
    for rank in likely:
        if not fits(rank, tuple(unit for unit in ranks[rank] if unit in blocks)):
            return None
    chosen: tuple[str, ...] = ()
    for rank, units in enumerate(ranks):
        here = [unit for unit in units if unit in blocks]
        least = bisect_left(range(len(here)), True, key=lambda k: fits(rank, tuple(here[:k])))
        chosen += tuple(here[:least])
    if not chosen or len(chosen) == len(blocks):
        return strategy.with_checkpointing("every" if chosen else "none")
    return replace(strategy, checkpointing="every", checkpoint_blocks=chosen, checkpoint_every=1)
