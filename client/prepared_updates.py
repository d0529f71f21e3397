"""Finished updates that a silo keeps until a group is asked to mask them, in buffered rounds under masks.

For each of them lies `STEP.plain`, the update as it was trained, and `STEP.json`, what masking it takes; both
are on the disk before the silo says that it is ready. An update stays until the next one of its job, the
withdrawal of its step, or the job's end, and is the silo's own: nothing here is ever sent.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from roundtable.client.door.incoming import ExchangeWork, ModelWork
from roundtable.client.durable_files import explained, replace_synced, sync
from roundtable.client.step_key import CHECK, StepKey
from roundtable.core.config import JobConfig
from roundtable.core.privacy_table import masking_of

_log = logging.getLogger("roundtable.agent")
PREPARE = "prepare"


@dataclass(frozen=True)
class PreparedUpdate:
    """What the silo knows of an update that it keeps.

    `model` is the digest of the model that it was trained from, `values` that of the model's values, `layout`
    the update's own, with `columns` values; `digest` and `size` are of the bytes. `loss` is (sum, count) of
    its training, where it has one. `masked_in` are the rounds in which it was, or was about to be, masked.
    """

    step: StepKey
    model: str
    values: str
    layout: str
    columns: int
    digest: str
    size: int
    examples: int
    loss: tuple[float, int] | None = None
    masked_in: tuple[int, ...] = ()


class PreparedUpdates:
    """The folder of these updates; a kill of the agent at any moment leaves it sound."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def keep(self, plain: Path, update: PreparedUpdate) -> None:
        """Takes the update's bytes from `plain`, on the same disk; durable when this returns.

        Raises ResourceError where they cannot be kept.
        """
        self.forget_job(update.step.job)
        sync(plain)
        place = self.plain_of(update.step)
        try:
            plain.replace(place)
        except OSError as error:
            raise explained(error, place) from error
        self._describe(update)

    def find(self, step: StepKey) -> PreparedUpdate | None:
        """The update that this step has left; None where there is none, any more."""
        return self._whole(self._description(step))

    def masks(self, update: PreparedUpdate, round: int) -> None:
        """Notes, before anything of it leaves, that the update is masked in a group of this round."""
        if round not in update.masked_in:
            self._describe(replace(update, masked_in=(*update.masked_in, round)))

    def plain_of(self, step: StepKey) -> Path:
        """The file of the update as it was trained."""
        return self._folder / f"{step.slug}.plain"

    def remove(self, step: StepKey) -> None:
        """Erases what a step has left, if anything."""
        self._description(step).unlink(missing_ok=True)
        self.plain_of(step).unlink(missing_ok=True)

    def forget_job(self, job: str) -> None:
        """Erases all that a job has left."""
        for path in [path for path in self._folder.iterdir() if path.stem.rsplit(".", 3)[0] == job]:
            path.unlink(missing_ok=True)

    def recover(self) -> list[StepKey]:
        """After a restart: erases what is not whole; returns the steps whose updates are kept."""
        found = [update for path in self._folder.glob("*.json") if (update := self._whole(path)) is not None]
        kept = sorted(update.step for update in found)
        names = {path.name for step in kept for path in (self._description(step), self.plain_of(step))}
        for path in self._folder.iterdir():
            if path.name not in names:
                path.unlink()
        return kept

    def _whole(self, description: Path) -> PreparedUpdate | None:
        """The update that is described there, if its bytes are as many; their digest is compared as it is
        masked."""
        try:
            kept = _read(description)
            size = self.plain_of(kept.step).stat().st_size
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            _log.warning("the finished update %s cannot be read and is dropped: %s", description.stem, error)
            return None
        return kept if size == kept.size and self._description(kept.step) == description else None

    def _describe(self, update: PreparedUpdate) -> None:
        replace_synced(self._description(update.step), [json.dumps(asdict(update)).encode()])

    def _description(self, step: StepKey) -> Path:
        return self._folder / f"{step.slug}.json"


def prepares(job: JobConfig) -> bool:
    """Whether silos of the job train in one step and mask in another."""
    return job.round.mode == "buffered" and masking_of(job.privacy) is not None


def objection_to_phase(phase: str, work: ModelWork | ExchangeWork, job: JobConfig) -> str:
    """Why a step of this phase cannot ask for this work in this job; "" where it can."""
    if not isinstance(work, ModelWork) or work.kind == "evaluate" or not prepares(job):
        if isinstance(work, ModelWork) and work.prepared is not None:
            return f"the step asks for the update of {work.prepared} to be masked, and the job keeps none"
        wanted = {CHECK: "evaluate"}.get(phase, phase)
        return "" if work.kind == wanted else f"the step's phase is {phase!r}, and its work {work.kind!r}"
    expected = PREPARE if work.prepared is None else "train"
    if phase == expected:
        return ""
    what = "to train" if work.prepared is None else f"to mask the update of {work.prepared}"
    return f"the step's phase is {phase!r}, and it asks {what}: in this job that has the phase {expected!r}"


def _read(path: Path) -> PreparedUpdate:
    fields = json.loads(path.read_bytes())
    loss, masked_in = fields["loss"], fields["masked_in"]
    pair = None if loss is None else (float(loss[0]), int(loss[1]))
    return PreparedUpdate(
        **{**fields, "step": StepKey(*fields["step"]), "loss": pair, "masked_in": tuple(map(int, masked_in))}
    )
