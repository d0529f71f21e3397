"""What the engine knows of a client beside a job, and hears of its work: declared, there, begun, done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from roundtable.core.observability.link_estimate import UNKNOWN_LINK, LinkEstimate

ClientState = Literal[
    "available", "queued", "training", "ready", "evaluating", "uploading", "offline", "dropped", "done"
]
Held = Literal["drained", "disabled", "unsuited"]
"""Why a client that may be there is asked for nothing new: its silo wants that, operators do, or it has less
than the job asks for."""


@dataclass(frozen=True, order=True)
class Step:
    """(round, attempt, phase): with the job's name the key under which everything is idempotent."""

    round: int
    attempt: int
    phase: str


@dataclass(frozen=True)
class ClientInfo:
    """What is declared about a client: `metadata` comes from the silo, `examples` from past rounds.

    `selected` and `completed` count its committed rounds over all jobs before it came.

    One that is `held` finishes what it was asked, and is asked for nothing new. `link` is what was measured
    of its line before the job.
    """

    name: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    examples: int | None = None
    held: Held | None = None
    link: LinkEstimate = UNKNOWN_LINK
    selected: int = 0
    completed: int = 0


def declared_examples(metadata: Mapping[str, str]) -> int | None:
    """How many examples a client declares under `examples`; None where it is no such number."""
    declared = metadata.get("examples", "")
    return int(declared) if declared.isascii() and declared.isdigit() and len(declared) < 16 else None


@dataclass(frozen=True)
class ClientJoined:
    """A client has connected and can be asked to work; with `online` false, it is only known."""

    info: ClientInfo
    online: bool = True


@dataclass(frozen=True)
class ClientLeft:
    """A client has disconnected. It may come back and deliver until the deadline."""

    client: str


@dataclass(frozen=True)
class ClientHeld:
    """A client that is known may be asked for nothing new from now on; with None, for everything again."""

    client: str
    held: Held | None


@dataclass(frozen=True)
class WorkStarted:
    """A client has begun its work, or has gone on to `state`."""

    client: str
    step: Step
    state: ClientState = "training"


@dataclass(frozen=True)
class UpdateReady:
    """A client has trained for `step` (phase `prepare`) and keeps its update until it is asked to mask it."""

    client: str
    step: Step
