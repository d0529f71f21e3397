"""A trained model, back in PyTorch."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from roundtable.core.errors import EncodingError
from roundtable.core.foundation.checkpoint_files import CheckpointTensors
from roundtable.core.models import open_model
from roundtable.core.paths import AnyPath


def load_model(path: AnyPath, *, partial: bool = False) -> dict[str, Tensor]:
    """The state dict in a model file that `roundtable job model` or a simulation wrote, or in the folder of
    shards that it wrote.

    Tied weights appear under every name. The tensors are copies in memory: the file may be deleted.
    `partial`: of a file without the model's frozen tensors what is there, such as adapters. Raises
    EncodingError if the file is missing, no such model, or not whole.
    """
    path = Path(path)
    if path.is_dir():
        shards = CheckpointTensors(path)
        shards.verify()
        return dict(shards)
    if not path.is_file():
        raise EncodingError(
            f"there is no model file {path}; `roundtable job model JOB -o {path}` fetches one"
        )
    model = open_model(path)
    if (lacking := model.lacking) and not partial:
        raise EncodingError(
            f"{path} lacks {len(lacking)} frozen tensors, such as {lacking[0]!r}, which did not travel: "
            f"`roundtable job model JOB --task FOLDER -o {path}` puts in those of the task in FOLDER; or "
            "load what is there over them: load_model(path, partial=True), load_state_dict(..., strict=False)"
        )
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}
