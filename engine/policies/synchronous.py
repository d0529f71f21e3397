"""Synchronous rounds: one cohort for each attempt, whose updates are awaited until a common deadline.

Another client is asked in the place of one that fails before the deadline, where `replacement.why_never`
names no reason against it. Nobody is replaced in an evaluation, which needs no certain number of clients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from roundtable.core.errors import SiteFailure
from roundtable.core.seeds import numpy_generator
from roundtable.engine import messages as m
from roundtable.engine.context import JobContext
from roundtable.engine.policies.replacement import draw_replacement, is_short, why_never
from roundtable.engine.policies.training_policy import (
    CheckModels,
    Combine,
    Decision,
    GiveUp,
    not_awaited,
    quorum_missed,
)
from roundtable.engine.selection import (
    begins_apart,
    in_turn,
    is_amplified,
    least_for_selection,
    quorum,
    rested,
    stayed,
)
from roundtable.engine.validation.secure_feasibility import fewest, fewest_groups, fewest_updates
from roundtable.engine.view import WHO_HELD, view

_NOBODY = ""
"""Drawn in the place of a silo that was there when the draw was charged, and is known no more."""

MOST_REPEATS = 2
"""How often a client is asked to send an update again that was damaged after it had been accepted."""


class SynchronousTraining:
    """The `TrainingPolicy` of jobs with `[round] mode = "synchronous"`."""

    def __init__(self, context: JobContext) -> None:
        self._context = context
        self._job = context.job
        self._state = context.state
        self._population = context.population

    def begin(self, now: float) -> Decision:
        """Looks for a cohort."""
        self._context.attempt().phase = m.SELECT
        return self._select(now)

    def client_joined(self, client: str, now: float) -> Decision:
        """Draws the cohort, repeats what the client was asked, or asks it in the place of one that failed."""
        attempt = self._context.attempt()
        if attempt.phase == m.SELECT:
            return self._select(now)
        if attempt.phase == m.TRAIN and client in attempt.awaited:
            self._context.instruct([client], now)
        elif attempt.phase == m.TRAIN:
            self._replace_failed(now)
        return None

    def client_failed(self, failure: SiteFailure, now: float) -> Decision:
        """Asks another client in the place of one that has failed, where that is wanted and allowed."""
        attempt, never = self._context.attempt(), why_never(self._job)
        del attempt.awaited[failure.site]
        replacement = self._replacement(now)
        action = f"the round goes on without this silo: {never}" if never else ""
        if replacement is not None:
            action = f"asked {replacement} in its place"
            attempt.awaited[replacement] = None
        self._context.drop(failure, now, action)
        if replacement is not None:
            self._replace(failure.site, replacement, now)
        return self.proceed(now)

    def proceed(self, now: float) -> Decision:
        """Combines once the wanted updates, or all that can still come, are there.

        With a quorum, clients that are offline are awaited for the grace time only.
        """
        attempt = self._context.attempt()
        arrived, awaited = len(attempt.updates), attempt.awaited
        if arrived >= attempt.target or (not awaited and arrived >= attempt.minimum):
            return Combine("the round has the updates that it needs")
        if arrived + len(awaited) < attempt.minimum:
            return GiveUp(quorum_missed(attempt))
        if arrived >= attempt.minimum and not self._context.awaits_somebody_online():
            self._context.set_timer("grace", now + self._job.cohort.grace)
        return None

    def timer_fired(self, timer: str, now: float) -> Decision:
        """Goes on without whoever has not come: to the cohort, back online, or before the deadline."""
        attempt = self._context.attempt()
        if attempt.phase == m.SELECT and timer == self._context.timer("wait"):
            attempt.settled = True
            return self._select(now)
        if attempt.phase == m.TRAIN and timer == self._context.timer("grace"):
            return self._grace_over(now)
        if attempt.phase == m.TRAIN and timer == self._context.timer("deadline"):
            return self._deadline_passed(now)
        return None

    def watch_deadlines(self, now: float) -> None:
        """Somebody's time runs on: sets the timer of the next one who may be late."""
        self._context.watch_deadlines(now)

    def reopen(self, damaged: Mapping[str, str], now: float) -> Decision:
        """Asks the clients to send the damaged updates again, `MOST_REPEATS` times; then excludes them.

        Until the round's deadline, or for the grace time if that is later.
        """
        attempt = self._context.attempt()
        failures = self._context.take_out(damaged)
        attempt.phase, attempt.deadline = m.TRAIN, max(attempt.due, now + self._job.cohort.grace)
        attempt.lines = {}
        self._context.set_timer("deadline", attempt.deadline)
        for failure in failures:
            name, asked = failure.site, attempt.repeats.get(failure.site, 0)
            attempt.awaited[name] = None
            if asked < MOST_REPEATS:
                attempt.repeats[name] = asked + 1
                self._context.trouble(failure, "asked the silo to send it again")
            else:
                action = f"asked the silo {asked} times to send it again, then excluded the update"
                self._context.drop(failure, now, action)
        self._context.instruct(attempt.awaited, now)
        self._replace_failed(now)
        return self.proceed(now)

    def restore(self, now: float) -> Decision:
        """Looks for a cohort again, or asks those whose updates are still awaited."""
        attempt = self._context.attempt()
        if attempt.phase == m.SELECT:
            attempt.settled, attempt.deadline = False, None
            return self._select(now)
        if attempt.phase == m.TRAIN:
            self._context.forget_time(attempt.awaited)
            self._context.extend_deadline(self._job.cohort.deadline, now)
            self._context.instruct(attempt.awaited, now)
            return self.proceed(now)
        return None

    def close(self, reason: str, now: float) -> None:
        """Withdraws the work of all who are still at it."""
        self._context.withdraw_awaited(reason)
        self._context.attempt().awaited = {}

    def attempt_failed(self) -> None:
        """The next attempt has another cohort: nothing is kept."""

    def settled(self, round: int) -> int:
        """The next round has another model: no update of this one can be wanted."""
        return round

    def refusal(self, client: str, step: m.Step) -> str:
        """Names who was asked in the client's place, where somebody was."""
        attempt = self._state.attempt
        if attempt is None or (attempt.round, attempt.number) != (step.round, step.attempt):
            return not_awaited(client, step)
        replacement = attempt.replacements.get(client)
        instead = f": {replacement} was asked in its place" if replacement else ""
        return not_awaited(client, step) + instead

    def _select(self, now: float) -> Decision:
        """Draws the cohort if enough clients are there; waits for more otherwise and notes that once."""
        attempt, cohort = self._context.attempt(), self._job.cohort
        amplified = is_amplified(self._job)
        sampled = cohort.strategy == "poisson" or amplified
        there = [n for n in rested(self._population.free(), self._state) if n not in attempt.failures]
        candidates = rested(self._population.known(), self._state) if sampled else there
        summed = self._state.summed
        if summed and not fewest_groups(self._job) and set(summed) <= set(candidates):
            attempt.cohort, attempt.target, attempt.minimum = summed, len(summed), len(summed)
            return self._begin_training(now)
        if apart := {*summed, *self._state.barred}:
            candidates = [name for name in candidates if name not in apart]
        if min(len(candidates), len(there)) < max(
            least_for_selection(cohort, attempt.settled, self._population), fewest(self._job)
        ):
            if attempt.deadline is None:
                attempt.deadline = now + cohort.wait
                self._context.set_timer("wait", attempt.deadline)
                self._context.note("waiting_for_clients", self._waiting_for())
            return None
        if self._state.unchecked:
            return CheckModels()
        # After the wait for enough silos, whose turn it may not be: a group can be empty.
        candidates = in_turn(candidates, self._job, self._state, attempt.round)
        if amplified and cohort.size is not None:
            # Fewer to draw from would take each oftener than was charged.
            candidates = [*candidates, *[_NOBODY] * (self._population.charged - len(candidates))]
        old: list[str] = []
        if not begins_apart(self._job, self._state, attempt.round):
            # Whoever is away now is not replaced.
            old = [
                name
                for name in stayed(self._job, self._state, attempt.round)
                if self._population.is_free(name)
            ]
            candidates = old or candidates
        wanted = min(cohort.size or len(candidates), len(candidates))
        ask = min(math.ceil(wanted * cohort.over_selection), len(candidates))
        # Another draw because of who did not answer would favour those who do: each attempt asks the same.
        number = 0 if amplified else attempt.number
        up = self._job.regions.goes_up(attempt.round - 1, self._job.rounds)
        chance = numpy_generator(self._state.selection_seed, up, number, "selection")
        drawn = old or self._context.choose(candidates, ask, chance)
        chosen = [name for name in drawn if name != _NOBODY]
        attempt.cohort = tuple(chosen)
        attempt.target = len(chosen) if sampled else wanted
        attempt.minimum = max(quorum(cohort, attempt.target), fewest_updates(self._job, attempt.target))
        if amplified:
            # To publish only where enough have answered would take those oftener than was charged.
            attempt.minimum = 0
        return self._begin_training(now)

    def _waiting_for(self) -> str:
        waiting_for = view(self._job, self._state, self._population).waiting_for
        if not self._state.summed:
            return waiting_for
        return (
            f"{waiting_for}; a sum of {', '.join(self._state.summed)} from this model may be known, so that "
            "either all of them or only others can be asked for another"
        )

    def _begin_training(self, now: float) -> Decision:
        attempt = self._context.attempt()
        attempt.phase = m.TRAIN
        seconds = self._context.deadline_for(attempt.cohort)
        attempt.deadline = attempt.due = now + seconds
        self._context.status("running", f"round {attempt.round} of {self._job.rounds}")
        for name in attempt.cohort:
            self._context.count_selection(name, now)
        detail: dict[str, Any] = {"cohort": list(attempt.cohort), "minimum": attempt.minimum}
        detail["seconds"] = seconds
        if steps := self._context.assign(attempt.cohort, now):
            detail["steps"] = steps
        names = ", ".join(attempt.cohort[:8]) + (" …" if len(attempt.cohort) > 8 else "") or "nobody"
        self._context.note("round_started", f"round {attempt.round}: {names}", detail=detail)
        self._context.set_timer("deadline", attempt.deadline)
        attempt.awaited = dict.fromkeys(attempt.cohort)
        self._leave_out_held(now)
        self._context.instruct(attempt.awaited, now)
        return self.proceed(now)

    def _leave_out_held(self, now: float) -> None:
        """Gives up on clients that are held: where the draw is from all that are known, it may hit them.

        They count as asked, like one that is offline: the accountant's sample is the one that was drawn.
        """
        attempt, held = self._context.attempt(), self._population.held()
        for name in [name for name in attempt.awaited if name in held]:
            detail = f"it is {WHO_HELD[held[name]]}"
            self._context.drop(
                SiteFailure(name, attempt.round, attempt.number, m.TRAIN, "refused", detail), now
            )

    def _replace_failed(self, now: float) -> None:
        """Asks clients in the places of those that have failed and could not be replaced then."""
        attempt = self._context.attempt()
        for failed in [name for name in attempt.failures if name not in attempt.replacements]:
            if (replacement := self._replacement(now)) is not None:
                self._replace(failed, replacement, now)

    def _replacement(self, now: float) -> str | None:
        """The client to ask in the place of one that has failed; None if nobody is to be asked."""
        if why_never(self._job) or not is_short(self._context):
            return None
        return draw_replacement(self._context, now)

    def _replace(self, failed: str, replacement: str, now: float) -> None:
        attempt = self._context.attempt()
        attempt.replacements[failed] = replacement
        attempt.cohort = tuple(sorted((*attempt.cohort, replacement)))
        attempt.awaited[replacement] = None
        self._context.count_selection(replacement, now)
        self._context.assign([replacement], now)
        message = f"asked {replacement} in the place of {failed}, which failed"
        self._context.note("client_replaced", message, failed, {"replacement": replacement})
        self._context.instruct([replacement], now)

    def _grace_over(self, now: float) -> Decision:
        attempt = self._context.attempt()
        if self._context.awaits_somebody_online() or len(attempt.updates) < attempt.minimum:
            return None
        self._give_up_on(list(attempt.awaited), "still offline after the grace time", now)
        return Combine("the round goes on without those that are offline")

    def _deadline_passed(self, now: float) -> Decision:
        attempt = self._context.attempt()
        late = self._context.late(now)
        for name in late:
            self._context.out.append(m.Withdraw(name, attempt.step, "the round's deadline has passed"))
        self._give_up_on(late, "no update before the deadline", now)
        if attempt.awaited:
            # The time of those that stood in line at their silos is not over yet.
            self._context.watch_deadlines(now)
            return self.proceed(now)
        if len(attempt.updates) >= attempt.minimum:
            return Combine("the deadline has passed")
        return GiveUp(quorum_missed(attempt))

    def _give_up_on(self, names: Sequence[str], reason: str, now: float) -> None:
        attempt = self._context.attempt()
        for name in names:
            (kind, detail), action = self._context.unanswered(name, reason), ""
            if name in attempt.lost:
                kind, detail = "data_corruption", f"its update is damaged and was not sent again: {reason}"
                action = "asked the silo to send it again, then excluded the update"
            if kind == "slow_node":
                self._context.miss_pace(name, now)
            failure = SiteFailure(name, attempt.round, attempt.number, m.TRAIN, kind, detail)
            self._context.drop(failure, now, action)
