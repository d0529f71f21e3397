"""Another client in the place of one that fails in a synchronous round: whether, and which.

A replacement makes who takes part depend on how others fare: it is ruled out where the draw of a cohort, or
what an accountant concludes from a sum, rests on the opposite.
"""

from __future__ import annotations

from roundtable.core.config import JobConfig
from roundtable.core.privacy_table import NoPrivacy, OwnNoise, masking_of
from roundtable.core.seeds import numpy_generator
from roundtable.engine.context import JobContext
from roundtable.engine.selection import rested


def why_never(job: JobConfig) -> str:
    """Why nobody may be asked in the place of a client that fails; "" where somebody may."""
    privacy = job.privacy
    if masking_of(privacy) is not None:
        return "its cohort has agreed upon the masks of secure aggregation"
    if not isinstance(privacy, NoPrivacy | OwnNoise):
        # A failure that depends on a silo's data would move another's update into the sum as well.
        return f'privacy.level = "{privacy.level}" counts on one silo changing one term of the sum only'
    if job.cohort.strategy == "poisson":
        return 'cohort.strategy = "poisson" draws each client by itself, whatever becomes of the others'
    return ""


def is_short(context: JobContext) -> bool:
    """Whether fewer updates have arrived or can still come than the round wants.

    Clients selected beyond that number (`cohort.over_selection`) take the places of the first that fail.
    """
    attempt = context.attempt()
    return len(attempt.updates) + len(attempt.awaited) < attempt.target


def draw_replacement(context: JobContext, now: float) -> str | None:
    """A client that is there and was not asked in this attempt, by the job's strategy; None if there is none.

    Nor after the deadline, nor once as many clients were replaced as updates are wanted: a task that fails
    everywhere must not go through the whole population in one attempt.
    """
    attempt, state = context.attempt(), context.state
    assert attempt.deadline is not None
    if now >= attempt.deadline or len(attempt.replacements) >= attempt.target:
        return None
    asked = set(attempt.cohort)
    chance = numpy_generator(
        state.selection_seed, attempt.round, attempt.number, "replacement", len(attempt.replacements)
    )
    drawn = context.choose_available(
        count=1,
        available=lambda name: name not in asked and bool(rested([name], state)),
        unavailable=len(asked),
        chance=chance,
    )
    return drawn[0] if drawn else None
