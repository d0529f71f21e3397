"""What people and the queue of jobs want of an engine: events that no client has caused."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cancel:
    """Ends the job for good."""

    reason: str


@dataclass(frozen=True)
class Pause:
    """Stops the job for now and gives up the round that runs."""

    reason: str


@dataclass(frozen=True)
class Resume:
    """Goes on after a pause, with a new attempt at the same round: at once, or when `Start` says so."""

    queued: bool = False


@dataclass(frozen=True)
class Yield:
    """The job gives its turn to another one: when its round ends, or now where nobody was asked yet."""

    reason: str


@dataclass(frozen=True)
class MovedInQueue:
    """Operators change the job's place in the queue: its priority; `hold` keeps it there, "" lets it go."""

    priority: int | None = None
    hold: str | None = None
