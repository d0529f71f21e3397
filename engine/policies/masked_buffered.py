"""Buffered rounds under secure aggregation: a buffer is one cohort, of clients that trained from one model.

Clients train all the time, as in FedBuff (Nguyen et al. 2022), but what they have trained they keep, and say
that it is ready. K that are ready and trained from the same model become a group: they run one attempt of the
masking protocol, and its sum makes the next model. So one attempt after the other, keyed (round, attempt), is
all that protocol, ledger and journal know of; and the staleness is one public number.

    gather (train, ready) → group (mask, upload) → aggregate → … ; training goes on beside all of it

A group of several models, as in Papaya (Huba et al. 2022, section 5), would let a coordinator give each
client a model of its own and read its update off the sum (Pasquini et al. 2022): nobody's masks cancel
against those of clients with another model.

Models that are older than the newest gain no more clients. So of each it is known at any moment how many can
still be ready, and nobody waits for a group that cannot come about:

- K are ready: the first K of them are a group; those whose last work was let go are among it, and waited for.
- fewer are left than K, and at least the quorum: they are a group once none of them is at work.
- fewer are left than the quorum: they are told to drop that work, and asked afresh from the newest model.

An attempt that fails leaves those of its group that have not failed ready, for another with new masks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from typing_extensions import override

from roundtable.core.errors import SiteFailure
from roundtable.engine import messages as m
from roundtable.engine.context import JobContext
from roundtable.engine.policies.buffered import WORK, BufferedTraining
from roundtable.engine.policies.training_policy import (
    CheckModels,
    Combine,
    Decision,
    GiveUp,
    not_awaited,
    quorum_missed,
)
from roundtable.engine.selection import quorum
from roundtable.engine.state import Assignment, Attempt, InLine
from roundtable.engine.validation.secure_feasibility import fewest_updates


class MaskedBufferedTraining(BufferedTraining):
    """The `TrainingPolicy` of jobs with `[round] mode = "buffered"` and secure aggregation."""

    _phase = m.PREPARE

    def __init__(self, context: JobContext) -> None:
        super().__init__(context)
        self._least = self._least_of(self._size)

    @override
    def begin(self, now: float) -> Decision:
        """Begins to gather, with those that were ready before."""
        attempt = self._context.attempt()
        if self._state.unchecked:
            return CheckModels()
        attempt.phase, attempt.target, attempt.minimum = m.TRAIN, self._size, self._least
        message = f"round {attempt.round}: {len(self._state.ready)} updates are ready already"
        detail = {"cohort": sorted(self._state.at_work), "minimum": attempt.minimum}
        self._context.note("round_started", message, detail=detail)
        self.watch_deadlines(now)
        return self.proceed(now)

    @override
    def client_joined(self, client: str, now: float) -> Decision:
        """Asks for the work, or for the mask, again; asks others where that leaves places."""
        attempt = self._context.attempt()
        if client in self._state.ready:
            self._state.ready[client].away = False
            self._context.mark(client, "ready", now)
        elif attempt.phase == m.TRAIN and client in attempt.awaited:
            self._context.instruct([client], now)
        return super().client_joined(client, now)

    @override
    def proceed(self, now: float) -> Decision:
        """Goes on with the group; without one, forms it of those who are ready or asks for more work."""
        attempt = self._context.attempt()
        if attempt.group:
            return self._group_goes_on(attempt, now)
        self._let_go_of_few(attempt, now)
        if group := self._next_group(attempt):
            return self._form(group, attempt, now)
        self._ask_more(now)
        if self._next_deadline(now) < self._watched:
            self.watch_deadlines(now)
        if not self._somebody_works():
            return self._starved(attempt, now)
        self._context.status("running", f"round {attempt.round} of {self._job.rounds}")
        attempt.deadline = None
        return None

    @override
    def timer_fired(self, timer: str, now: float) -> Decision:
        """Gives up on late clients; forms a smaller group if nobody works at the end of the grace time."""
        attempt = self._context.attempt()
        if timer == WORK:
            self._give_up_on_late(now)
            return self.proceed(now) if attempt.phase == m.TRAIN else None
        if attempt.phase != m.TRAIN:
            return None
        if attempt.group and timer == self._context.timer("deadline"):
            return self._group_is_late(attempt, "no masked update before the deadline", now)
        if timer != self._context.timer("grace"):
            return None
        if attempt.group:
            there = self._context.awaits_somebody_online() or len(attempt.updates) < attempt.minimum
            return None if there else self._group_is_late(attempt, "offline after the grace time", now)
        self._ask_more(now)
        group = self._there(attempt.round)
        if attempt.deadline is None or self._somebody_works() or len(group) < self._least:
            return None
        return self._form(group[: self._size], attempt, now)

    @override
    def client_failed(self, failure: SiteFailure, now: float) -> Decision:
        """Goes on without the client, in the group or beside it."""
        attempt = self._context.attempt()
        self._context.drop(failure, now)
        return self.proceed(now) if attempt.phase == m.TRAIN else None

    @override
    def reopen(self, damaged: Mapping[str, str], now: float) -> Decision:
        """Gives the attempt up: no vector is masked twice, and a sum that lacks one cannot be unmasked."""
        attempt = self._context.attempt()
        attempt.phase = m.TRAIN
        for failure in self._context.take_out(damaged):
            attempt.lost.pop(failure.site)
            attempt.failures[failure.site] = failure
            self._context.note_failure(failure)
        return GiveUp(f"masked updates were damaged: {', '.join(sorted(damaged))}")

    @override
    def restore(self, now: float) -> Decision:
        """Asks those at work, and the group, again; the others have the grace time to find their way back."""
        attempt, grace = self._context.attempt(), now + self._job.cohort.grace
        for name, given in self._state.ready.items():
            given.away = not self._population.is_online(name)
            given.deadline = grace
        if attempt.phase == m.TRAIN and attempt.group:
            self._context.forget_time(attempt.awaited)
            self._context.extend_deadline(self._job.cohort.deadline, now)
            self._context.instruct(attempt.awaited, now)
            deadline = attempt.deadline
            decision = super().restore(now)
            attempt.deadline = deadline
            return decision
        return super().restore(now)

    @override
    def close(self, reason: str, now: float) -> None:
        """Withdraws what would be too stale in the next round; whoever was let go before is even now."""
        super().close(reason, now)
        attempt = self._context.attempt()
        attempt.cohort = tuple(sorted(attempt.group))
        for name in attempt.awaited:
            self._context.out.append(m.Withdraw(name, attempt.step, reason))
        attempt.awaited = {}
        self._state.owed = tuple(name for name in self._state.owed if name not in attempt.updates)
        following = attempt.round + 1
        for name, given in list(self._state.ready.items()):
            if following - given.round > self._round.max_staleness:
                self._let_go(name, self._too_stale(given.round, following), now)

    @override
    def attempt_failed(self) -> None:
        """Those of the group that have not failed are ready again: nobody has unmasked their updates."""
        attempt, state = self._context.attempt(), self._state
        kept = {name: given for name, given in attempt.group.items() if name not in attempt.failures}
        for name, given in kept.items():
            given.away = not self._population.is_online(name)
        state.ready = {**kept, **state.ready}

    @override
    def settled(self, round: int) -> int:
        """Masked updates are of the round that they are combined in."""
        return round

    @override
    def refusal(self, client: str, step: m.Step) -> str:
        """Only the group is asked for masked updates."""
        return not_awaited(client, step)

    def _least_of(self, size: int) -> int:
        """The fewest of `size` whose masks still come off, and whose model the job takes."""
        return max(quorum(self._job.cohort, size), fewest_updates(self._job, size))

    def _members(self, version: int) -> set[str]:
        """Who trains, or has trained, from the model that round `version` began with."""
        return {name for name, given in self._given().items() if given.round == version}

    def _there(self, version: int) -> list[str]:
        """Those of them who are ready and online: first whose last work was let go, then as they came."""
        ready = self._state.ready.items()
        names = [n for n, g in ready if g.round == version and self._population.is_online(n)]
        return sorted(names, key=lambda name: name not in self._state.owed)

    def _next_group(self, attempt: Attempt) -> Sequence[str]:
        """The group that can be formed now, of the oldest model that has one; empty if there is none."""
        for version in sorted({given.round for given in self._state.ready.values()}):
            there, members = self._there(version), self._members(version)
            if again := members & set(self._state.summed):
                if len(there) == len(again) == len(members):
                    return there
            elif len(there) >= self._size:
                chosen = there[: self._size]
                rest = members.difference(chosen)
                if len(rest) >= self._least or not rest.intersection(self._state.owed):
                    return chosen
            elif version < attempt.round and len(there) == len(members) >= self._least:
                return there
        return ()

    def _let_go_of_few(self, attempt: Attempt, now: float) -> None:
        """Has those drop their work of whose model too few are left for a group."""
        summed = set(self._state.summed)
        for version in sorted({given.round for given in self._given().values()}):
            members = self._members(version)
            few = version < attempt.round and len(members) < self._least
            if again := members & summed:
                few = again != summed
            if few:
                said = (
                    f"{len(members)} are left that trained from model {version - 1}: too few to hide in a sum"
                )
                for name in sorted(members):
                    self._let_go(name, said, now)

    def _given(self) -> dict[str, Assignment]:
        return {**self._state.at_work, **self._state.ready}

    def _let_go(self, name: str, reason: str, now: float) -> None:
        """The client drops its work, which nobody has seen, and is waited for in a group to come."""
        given = self._state.given(name)
        assert given is not None
        self._state.at_work.pop(name, None)
        self._state.ready.pop(name, None)
        self._state.owed = tuple(sorted({*self._state.owed, name}))
        self._context.out.append(m.Withdraw(name, given.step, reason))
        self._context.mark(name, "available", now)
        self._context.note("work_let_go", f"{name} drops its update, unseen: {reason}", name)

    def _form(self, group: Sequence[str], attempt: Attempt, now: float) -> Decision:
        """Asks the group for masked updates; nobody else is asked for work until its sum is made."""
        names = tuple(sorted(group))
        attempt.group = {name: self._state.ready.pop(name) for name in names}
        for name in names:
            attempt.failures.pop(name, None)  # Of work before that which is masked now.
        first = attempt.group[names[0]]
        attempt.source, attempt.cohort = first.model, names
        attempt.target = len(names)
        again = not self._state.summed or set(names).isdisjoint(self._state.summed)
        attempt.minimum = self._least_of(len(names)) if again else len(names)
        attempt.awaited = dict.fromkeys(names)
        attempt.deadline = attempt.due = now + self._job.cohort.deadline
        self._context.set_timer("deadline", attempt.deadline)
        message = f"round {attempt.round}: a group of {len(names)} that trained from model {first.round - 1}"
        detail = {"cohort": list(names), "minimum": attempt.minimum}
        self._context.note("group_formed", message, detail=detail)
        self._context.status("running", f"round {attempt.round} of {self._job.rounds}")
        self._context.instruct(attempt.awaited, now)
        return self._group_goes_on(attempt, now)

    def _group_goes_on(self, attempt: Attempt, now: float) -> Decision:
        arrived, awaited = len(attempt.updates), attempt.awaited
        if arrived + len(awaited) < attempt.minimum:
            return GiveUp(quorum_missed(attempt))
        if not awaited:
            return Combine("the group's masked updates are here")
        if arrived >= attempt.minimum and not self._context.awaits_somebody_online():
            self._context.set_timer("grace", now + self._job.cohort.grace)
        return None

    def _group_is_late(self, attempt: Attempt, reason: str, now: float) -> Decision:
        for name in list(attempt.awaited):
            kind, detail = self._context.unanswered(name, reason)
            self._context.out.append(m.Withdraw(name, attempt.step, reason))
            failure = SiteFailure(name, attempt.round, attempt.number, m.TRAIN, kind, detail)
            self._context.drop(failure, now)
        return self._group_goes_on(attempt, now)

    @override
    def _idle(self, name: str) -> bool:
        """Not asked in this attempt, without finished work, and free to train from the newest model.

        After a round that may have been seen, and has made no model, only others than its clients are.
        """
        state, attempt = self._state, self._context.attempt()
        if name in state.ready or name in attempt.cohort or not super()._idle(name):
            return False
        return name not in (*state.summed, *state.barred) and not any(map(state.given, state.summed))

    @override
    def _starved(self, attempt: Attempt, now: float) -> Decision:
        """Nobody is at work and nobody can be asked: a quorum is enough, after the grace time."""
        summed = self._state.summed
        if len(self._there(attempt.round)) >= self._least and not summed:
            if attempt.deadline is None:
                attempt.deadline = now + self._job.cohort.grace
                self._context.set_timer("grace", attempt.deadline)
            return None
        idle = [n for n in summed if self._population.is_free(n) and n not in attempt.cohort]
        if summed and len(idle) == len(summed) and not self._state.at_work:
            for name in list(self._state.ready):
                self._let_go(name, "too few others are there, and a sum that may be known is made again", now)
            self._ask(idle, now)
            return None
        return super()._starved(attempt, now)

    def _next_deadline(self, now: float) -> float:
        away = (given.deadline for given in self._state.ready.values() if given.away)
        return min(away, default=self._watched)

    @override
    def watch_deadlines(self, now: float) -> None:
        """Sets the timer of whoever may be late first, at work or with a finished update and offline."""
        super().watch_deadlines(now)
        if self._next_deadline(now) < self._watched:
            self._watched = self._next_deadline(now)
            self._context.out.append(m.SetTimer(WORK, self._watched))

    @override
    def _give_up_on_late(self, now: float) -> None:
        """Whoever has finished and does not come back within the grace time keeps nobody waiting."""
        for name, given in list(self._state.ready.items()):
            if given.away and given.deadline <= now:
                self._state.at_work[name] = replace(self._state.ready.pop(name), line=InLine())
        super()._give_up_on_late(now)
