"""Which encodings the way down takes, and what they do not go together with: refused before round 1."""

from __future__ import annotations

from pathlib import Path

from roundtable.core.algorithms.contract import ClientAlgorithm
from roundtable.core.config import JobConfig
from roundtable.core.encodings import Encoding, get_encoding
from roundtable.core.errors import ConfigError, EncodingError
from roundtable.core.layout import Layout
from roundtable.core.plugins.calls import named_at

_KEY = ("transfer", "down")
_MANY = 1 << 20


def down_encoding(job: JobConfig, algorithm: ClientAlgorithm, folder: Path | None = None) -> Encoding | None:
    """How the change from model to model is encoded; None where silos get the exact model.

    ConfigError for encodings whose error the next round does not make good.
    """
    if job.transfer.down == "float32":
        return None
    with named_at(*_KEY):
        try:
            encoding = get_encoding(job.transfer.down, folder)
        except EncodingError as error:
            raise ConfigError(str(error)) from error
    said = f"transfer.down = {job.transfer.down!r}"
    if not encoding.traits.contractive(_MANY):
        raise ConfigError(
            f"{said}: what it leaves out is sent with the next round's change, and that converges only where "
            'each encoding comes nearer to what it encodes; this one need not. Choose "int4" or "int8", or a '
            "top-k",
            key=_KEY,
        )
    if encoding.traits.by_round:
        raise ConfigError(
            f"{said}: what changed from model to model carries no round to warm up by; leave warmup out",
            key=_KEY,
        )
    if job.common_rank is not None:
        raise ConfigError(
            f"{said} and transfer.up = {job.transfer.up!r}: the server sends the basis that updates go by "
            "beside the model, and rounded it would not be orthonormal; leave transfer.down out",
            key=_KEY,
        )
    for place in algorithm.places:
        if place.compression is None:
            raise ConfigError(
                f"{said} and algorithm {job.algorithm.name!r}: the server sends {place.name!r} beside the "
                "model, with no rule for rounding it; leave transfer.down out",
                key=_KEY,
            )
    return encoding


def check_down_layout(job: JobConfig, layout: Layout, folder: Path | None = None) -> None:
    """ConfigError where tensors travel in the vector that rounding would spoil."""
    if job.transfer.down == "float32" or get_encoding(job.transfer.down, folder).dense_dtype is not None:
        return
    buffers = [spec.name for spec in layout.averaged if spec.kind == "buffer"]
    if buffers:
        more = f" and {len(buffers) - 1} more" if len(buffers) > 1 else ""
        raise ConfigError(
            f"transfer.down = {job.transfer.down!r} and the buffer {buffers[0]!r}{more}: values that share a "
            "scale are rounded together, and a running variance could turn negative; set [model] buffers = "
            '"local", use GroupNorm in the place of BatchNorm, or transfer.down = "bfloat16"',
            key=_KEY,
        )
