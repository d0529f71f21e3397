"""The decisions in which synchronous and buffered rounds differ.

`RoundEngine` has one `TrainingPolicy` and calls it while updates are collected; authorisation, aggregation,
evaluation and commit are the same for both. A policy changes the attempt and asks clients to train; it does
not end training itself, but returns a `Decision` that says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from roundtable.core.errors import SiteFailure
from roundtable.engine import messages as m
from roundtable.engine.state import Attempt


@dataclass(frozen=True)
class Combine:
    """Training is over, for this reason: the updates that have arrived are combined."""

    reason: str


@dataclass(frozen=True)
class GiveUp:
    """The attempt can no longer succeed, for this reason."""

    reason: str


@dataclass(frozen=True)
class CheckModels:
    """Silos are there, and are asked first whether they make the job's model; `begin` comes again then."""


Decision = Combine | GiveUp | CheckModels | None
"""None: the phase goes on."""


class TrainingPolicy(Protocol):
    """Decides whom to ask, when the updates are enough, and what becomes of those that are not combined."""

    def begin(self, now: float) -> Decision:
        """Starts collecting updates for the attempt, which has just been authorised."""

    def client_joined(self, client: str, now: float) -> Decision:
        """A client has come online: asks it again for what it owes, or for the first time."""

    def client_failed(self, failure: SiteFailure, now: float) -> Decision:
        """A client will not deliver the update that it was asked for."""

    def proceed(self, now: float) -> Decision:
        """Called in training after every update and departure."""

    def timer_fired(self, timer: str, now: float) -> Decision:
        """A timer has run out that is not the evaluation's; stale ones are ignored."""

    def reopen(self, damaged: Mapping[str, str], now: float) -> Decision:
        """Returns to training because accepted updates (client → what is wrong) cannot be read any more."""

    def restore(self, now: float) -> Decision:
        """Repeats the instructions and timers that may have been lost with the process."""

    def close(self, reason: str, now: float) -> None:
        """Training has ended: withdraws work whose update could no longer be used."""

    def attempt_failed(self) -> None:
        """Another attempt follows: sets aside the updates that it can still use."""

    def watch_deadlines(self, now: float) -> None:
        """A client's time runs on, after its work stood in line at it: it may be late before anybody else."""

    def settled(self, round: int) -> int:
        """The last round of which no update can be wanted once `round` is committed."""

    def refusal(self, client: str, step: m.Step) -> str:
        """Why the update of `client` for `step` is not wanted, for the person who looks after the client."""


def not_awaited(client: str, step: m.Step) -> str:
    """The refusal of an update of which no more is known than that nobody waits for it."""
    return f"round {step.round}, attempt {step.attempt} does not wait for an update of {client}"


def quorum_missed(attempt: Attempt) -> str:
    """Why an attempt has too few updates: how many there are, and how each client failed."""
    failures = "; ".join(f"{name}: {failure.detail}" for name, failure in sorted(attempt.failures.items()))
    return f"{len(attempt.updates)} of at least {attempt.minimum} updates ({failures or 'nobody answered'})"
