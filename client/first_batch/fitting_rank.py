"""The rank of low-rank factors that a client's memory holds, of those that a job leaves it to choose from."""

from __future__ import annotations

from collections.abc import Sequence

from roundtable.client.first_batch.enough_memory import Room, TriedStep, has, of_rank
from roundtable.client.first_batch.step_memory import NotEstimated
from roundtable.core.quantities import format_bytes


def fitting_rank(
    step: TriedStep | None, choices: Sequence[int], room: Room | None, kept: int | None = None
) -> tuple[int, str]:
    """The largest of `choices`, which fall, of which the step has room without being tight; the smallest
    where none has, or nobody can tell. With the reason, for people.

    One that was `kept` stays as long as it has room at all, and no larger one is taken.
    """
    if kept in choices:
        choices = choices[choices.index(kept) :]
    else:
        kept = None
    if step is None or room is None:
        return kept or choices[-1], "nobody can tell what a training step needs, or what memory there is"
    needed = 0
    try:
        for rank in choices:
            tried = of_rank(step, rank)
            fits = tried.fits(room)
            if not fits:
                needed = tried.needed(step.examples)
            if fits or (rank == kept and needed <= step.there(room)):
                return rank, has(step, room)
    except NotEstimated as error:
        return kept or choices[-1], f"what a training step needs cannot be counted ({error})"
    return choices[-1], f"even that needs {format_bytes(needed)} by estimate, and {has(step, room)}"
