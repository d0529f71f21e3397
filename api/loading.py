"""A trained model, back in PyTorch."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from roundtable.core.errors import EncodingError
from roundtable.core.models import open_model
from roundtable.core.paths import AnyPath


def load_model(path: AnyPath) -> dict[str, Tensor]:
    """The state dict in a model file that `roundtable job model` or a simulation wrote.

    Tied weights appear under every name. The tensors are copies in memory: the file may be deleted.
    Raises EncodingError if the file is missing or no such model.
    """
    path = Path(path)
    if not path.is_file():
        raise EncodingError(
            f"there is no model file {path}; `roundtable job model JOB -o {path}` fetches one"
        )
    return {name: tensor.clone() for name, tensor in open_model(path).state_dict().items()}
