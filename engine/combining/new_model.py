"""A round's new model as an artifact: the same bytes wherever it is made."""

from __future__ import annotations

from torch import Tensor

from roundtable.core.config import JobConfig
from roundtable.core.models import Model


def held_note(job: JobConfig) -> dict[str, str]:
    """What the artifact says where silos do not get the exact model."""
    if job.transfer.down == "float32":
        return {}
    return {
        "transfer": f"the model as silos hold it: its changes travel as {job.transfer.down}, and what "
        "that leaves out yet is the coordinator's state"
    }


def new_model(job: JobConfig, old: Model, vector: Tensor, round: int, guarantee: str = "") -> Model:
    """The model of a round (from 1) with this vector [d]; `guarantee` says what privacy it gives, if any."""
    metadata = {"job": job.title, "round": str(round)}
    if guarantee:
        metadata["privacy"] = guarantee
    metadata |= held_note(job)
    return Model(old.layout, vector, old.local, metadata)
