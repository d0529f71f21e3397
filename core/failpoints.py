"""Named places at which a process can be made to fail, for tests that kill it there.

Nothing happens unless the environment variable ROUNDTABLE_FAILPOINT names a place when the process starts:

    ROUNDTABLE_FAILPOINT="round/phase/point[:action]"     for example 2/train/update_described:kill

`*` stands for any round or phase; a place that serves all rounds alike has neither. A transition is named
after the phase that it leads to: a round under privacy begins with `authorize`, another with `select`, and a
committed one is `commit`. The process is the one whose environment it is. The action is `kill` (SIGKILL, the
default) or `stop` (SIGSTOP: the process stands still until SIGCONT); it is taken once.
`POINTS` are all the places, and what has just happened there.
"""

from __future__ import annotations

import os
import signal
from typing import Protocol

from roundtable.core.errors import ConfigError
from roundtable.core.machine.stop_signals import KILL

VARIABLE = "ROUNDTABLE_FAILPOINT"

COORDINATOR_POINTS = {
    "job_stored": "a submitted job is in the database; nobody drives it yet, its submitter has no answer",
    "transition_due": "the engine has decided; nothing of the decision is in the database",
    "transition_open": "the decision is written within the transaction, which is not committed",
    "transition_stored": "the decision is durable; nobody has been told, nothing it asks for has begun",
    "transition_done": "what the decision asks for was sent or begun",
    "model_part_sent": "the first chunk of a model was handed to the network",
    "update_part": "the first chunk of an update has arrived; another may follow",
    "blob_synced": "an update or model is whole and on the disk, without its name",
    "blob_named": "an update or model has its name; the database does not mention it",
    "receipt_due": "an update counts, durably; the silo has no receipt",
    "aggregated": "the new model is on the disk, synced; the engine does not know",
    "retired": "the database has forgotten old artifacts; their files are still there",
}
AGENT_POINTS = {
    "accepted": "an instruction was accepted; nothing is done",
    "model_part": "the first bytes of a model are in its partial file",
    "model_here": "the model is here, whole and verified",
    "update_encoded": "the update's bytes are written; what the silo remembers of it is not",
    "memory_kept": "what is remembered is durable too, and does not count; nobody knows of the update",
    "update_written": "the update's bytes are written; without a description they count as unfinished",
    "update_described": "the update is in the spool; its upload has begun at most",
    "upload_part": "the first chunk of the update was handed to the network",
    "receipt_here": "the coordinator's receipt is here; the update is still in the spool",
    "evaluated": "the model is evaluated; the answer was not sent",
    "update_kept": "an update that a group is to mask is durable; the coordinator does not know of it",
    "masked": "a masked update is written; the keys that made it are not kept yet",
    "keys_kept": "a masked update and its sealed keys are durable; nothing of it was sent",
}
RELAY_POINTS = {
    "update_held": "an update and who signed it are durable at the relay; the silo has no receipt",
    "updates_summed": "a sum and the relay's statement are durable; the coordinator does not know of it",
    "region_made": "the region's model of a round within it is on the disk; the round is not over",
    "region_moved": "a round within the region is over, durably; no silo has a receipt or the next order",
    "receipt_handed_on": "the coordinator's receipt is at the relay, which still holds the update",
}
POINTS = {**COORDINATOR_POINTS, **AGENT_POINTS, **RELAY_POINTS}
_ACTIONS = {"kill": KILL, "stop": getattr(signal, "SIGSTOP", KILL)}


class Failpoint:
    """One place, armed; it fails there the first time that it is reached."""

    def __init__(self, text: str) -> None:
        place, _, action = text.partition(":")
        parts = place.split("/")
        if len(parts) != 3 or parts[2] not in POINTS or (action or "kill") not in _ACTIONS:
            raise ConfigError(
                f"{VARIABLE}={text!r}: write round/phase/point:action, where the point is one of "
                f"{', '.join(POINTS)} and the action kill or stop"
            )
        self._round, self._phase, self._point = parts
        self._signal = _ACTIONS[action or "kill"]
        self._armed = True

    def reach(self, point: str, round: int = 0, phase: str = "") -> None:
        """Kills or stops the process if this is the armed place, the first time that it comes here."""
        here = (
            self._armed
            and point == self._point
            and self._round in ("*", str(round))
            and self._phase in ("*", phase)
        )
        if here:
            self._armed = False
            os.kill(os.getpid(), self._signal)


def _nothing(point: str, round: int = 0, phase: str = "") -> None:
    """Does nothing: the failpoint of a process in which none is armed."""


class Reached(Protocol):
    """The call at each place: the process is at `point` of (`round`, `phase`)."""

    def __call__(self, point: str, round: int = 0, phase: str = "") -> None: ...


def _armed() -> Reached:
    text = os.environ.get(VARIABLE)
    return Failpoint(text).reach if text else _nothing


failpoint = _armed()
"""Marks a place: takes the armed action where it is this one, and does nothing otherwise."""
