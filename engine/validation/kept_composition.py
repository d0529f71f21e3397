"""What `[keep] best` does not go together with: refused before round 1."""

from __future__ import annotations

from roundtable.core.algorithms.contract import ClientAlgorithm
from roundtable.core.config import JobConfig
from roundtable.core.errors import ConfigError
from roundtable.core.layout import Layout
from roundtable.core.tensor_spec import DTYPES

_KEY = ("keep", "best")


def check_kept(job: JobConfig, algorithm: ClientAlgorithm) -> None:
    """ConfigError for a job whose best model could not be told, or would not be what was measured."""
    if not job.keep.best:
        return
    if job.stop.metric is None:
        raise ConfigError('keep.best: best by what? Name it: [stop] metric = "accuracy"', key=_KEY)
    if job.evaluation.every == 0 and not job.stop.central:
        raise ConfigError(
            "keep.best and evaluation.every = 0: no model is measured, so none is the best; training "
            "figures are of the silos' models before they are joined",
            key=_KEY,
        )
    if algorithm.keeps_own():
        raise ConfigError(
            f"keep.best and algorithm {job.algorithm.name!r}: what a silo measures is the model with its "
            "own part, which goes on changing there; no earlier one is kept. Leave keep.best out; "
            "keep.every keeps global models",
            key=_KEY,
        )


def check_kept_layout(job: JobConfig, layout: Layout) -> None:
    """ConfigError where tensors that stay at the silos are a part of what they measure."""
    if not job.keep.best:
        return
    staying = (spec for spec in layout.tensors if spec.rule == "local")
    local = [spec.name for spec in staying if DTYPES[spec.dtype].is_floating_point]
    if local:
        raise ConfigError(
            f"keep.best and the local tensor {local[0]!r}: what a silo measures is the model with its own "
            "tensors, which go on changing there; no earlier ones are kept. Leave keep.best out, or let all "
            "tensors travel",
            key=_KEY,
        )
