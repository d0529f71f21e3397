"""Keeps finished updates on disk until the coordinator has them: encoded bytes with a description.

The bytes of a delivered one stay until its round is over: should they be damaged there, they are sent again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from roundtable.client.door.model_names import ArtifactName
from roundtable.client.door.outgoing import UpdateFigures
from roundtable.client.durable_files import digest_of, sync, write_file
from roundtable.client.step_key import StepKey
from roundtable.core.failpoints import failpoint
from roundtable.core.observability.released import Told, public
from roundtable.core.observability.transfer_figures import NOTHING_CAME, ModelArrival, Writing

_log = logging.getLogger("roundtable.agent")
_NOTHING = public(UpdateFigures())


@dataclass(frozen=True)
class Finished:
    """An update that is ready to be sent.

    `announcement` signs a masked one (hexadecimal), which holds its example count and metrics inside; `model`
    is the digest of the model that it was trained from, `told` what of its training may go with it, `arrival`
    what came of models before.
    """

    step: StepKey
    digest: str
    size: int
    layout: str
    encoding: str
    told: Told[UpdateFigures] = _NOTHING
    announcement: str = ""
    model: str = ""
    arrival: ModelArrival = NOTHING_CAME

    @property
    def content(self) -> ArtifactName:
        """The name of the encoded bytes."""
        return ArtifactName(self.digest, self.size)


class Spool:
    """The folder of finished updates; a kill of the agent at any moment leaves it sound."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def bytes_of(self, step: StepKey) -> Path:
        """The file of an update's encoded bytes; without its description it counts as unfinished."""
        return self._folder / f"{step.slug}.update"

    def plain_of(self, step: StepKey) -> Path:
        """The file of an update that is still to be masked; never sent, and removed at a restart."""
        return self._folder / f"{step.slug}.plain"

    def describe(self, finished: Finished) -> None:
        """Writes the description: from now on a restart of the agent finds the update."""
        text = json.dumps(asdict(finished)).encode()
        partial = self._folder / f".{finished.step.slug}.partial"
        write_file(partial, [text])
        partial.replace(self._description(finished.step))
        failpoint("update_described", finished.step.round, finished.step.phase)

    def sync(self, step: StepKey) -> None:
        """Makes the update safe from power cuts too: syncs its bytes, then its description."""
        sync(self.bytes_of(step))
        sync(self._description(step))
        sync(self._folder)

    def keep(self, step: StepKey) -> None:
        """Marks the update as delivered; its bytes stay until `forget`, `take_back`, or a restart."""
        self._description(step).unlink(missing_ok=True)
        self.bytes_of(step).replace(self._sent(step))

    def take_back(self, step: StepKey) -> None:
        """Makes a delivered update one that is to be delivered again; it has to be described anew."""
        self._sent(step).replace(self.bytes_of(step))

    def forget(self, step: StepKey) -> None:
        """Removes a delivered update."""
        self._sent(step).unlink(missing_ok=True)

    def remove(self, step: StepKey) -> None:
        """Removes all files of the update: the coordinator has it or does not want it."""
        self._description(step).unlink(missing_ok=True)
        self.bytes_of(step).unlink(missing_ok=True)
        self.plain_of(step).unlink(missing_ok=True)

    def recover(self) -> list[Finished]:
        """Returns updates that an earlier process did not deliver; removes incomplete and damaged ones."""
        finished = list(self._readable())
        kept = {
            path for item in finished for path in (self.bytes_of(item.step), self._description(item.step))
        }
        for path in self._folder.iterdir():
            if path not in kept:
                path.unlink()
        return sorted(finished, key=lambda item: item.step)

    def _readable(self) -> Iterator[Finished]:
        for path in self._folder.glob("*.json"):
            try:
                fields = json.loads(path.read_bytes())
                item = _finished(fields)
                whole = digest_of(self.bytes_of(item.step)) == item.digest
            except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
                _log.warning("the finished update %s cannot be read and is dropped: %s", path.stem, error)
                continue
            if whole:
                yield item
            else:
                _log.warning("the finished update %s is damaged on disk and is dropped", path.stem)

    def _sent(self, step: StepKey) -> Path:
        return self._folder / f"{step.slug}.sent"

    def _description(self, step: StepKey) -> Path:
        return self._folder / f"{step.slug}.json"


def _finished(fields: Mapping[str, Any]) -> Finished:
    step, arrival = StepKey(*fields["step"]), ModelArrival(*fields["arrival"])
    return Finished(**{**fields, "step": step, "told": _told(fields["told"]), "arrival": arrival})


def _told(kept: Mapping[str, Any]) -> Told[UpdateFigures]:
    """What was held against the job's level before it was written down."""
    metrics = {name: (value, count) for name, (value, count) in kept["value"]["metrics"].items()}
    writing = Writing.from_plain(kept["value"]["writing"]) if kept["value"]["writing"] else None
    return Told(UpdateFigures(kept["value"]["examples"], metrics, writing))
