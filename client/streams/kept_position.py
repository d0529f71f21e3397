"""A reading's position as a tensor that stays at the silo, among those that a client keeps between rounds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from roundtable.core.errors import EncodingError, TaskError

NAME = "stream/position"
DAMAGED = (
    "the kept position in the training data is damaged; remove the job's folder from the agent's state "
    "folder to begin anew in them"
)
_MOST_BYTES = 1 << 20

Position = dict[str, Any]
"""Plain values, as JSON has them; what they mean is the reader's affair."""


def position_tensor(position: Position) -> Tensor:
    """The position as uint8 [bytes of its JSON]. Raises TaskError for one of more than 1 MiB."""
    data = json.dumps(position, separators=(",", ":"), allow_nan=False).encode()
    if len(data) > _MOST_BYTES:
        raise TaskError(
            f"the position in the training data takes {len(data):,} bytes, and {_MOST_BYTES:,} can be kept; "
            "let state_dict() of the data set give less"
        )
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


def kept_position(local: Mapping[str, Tensor] | None) -> Position | None:
    """The position among the tensors that a client kept; None where there is none.

    Raises EncodingError for a tensor that `position_tensor` did not make.
    """
    tensor = (local or {}).get(NAME)
    if tensor is None:
        return None
    try:
        if tensor.dtype != torch.uint8 or tensor.dim() != 1 or len(tensor) > _MOST_BYTES:
            raise EncodingError(DAMAGED)
        position = json.loads(tensor.numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise EncodingError(DAMAGED) from error
    if not isinstance(position, dict):
        raise EncodingError(DAMAGED)
    return position


def is_count(value: object) -> TypeGuard[int]:
    """Whether a value of a position is a whole number that can count bytes, examples or epochs."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62
