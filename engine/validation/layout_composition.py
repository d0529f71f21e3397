"""What a job's tables do not go together with in a model's layout: refused before round 1."""

from __future__ import annotations

from pathlib import Path

from roundtable.core.config import JobConfig
from roundtable.core.errors import PrivacyError
from roundtable.core.layout import Layout
from roundtable.core.observability.unnoised_parts import unnoised_part
from roundtable.core.privacy_table import ExampleLevel, NoPrivacy
from roundtable.engine.validation.down_composition import check_down_layout
from roundtable.engine.validation.kept_composition import check_kept_layout


def check_layout(job: JobConfig, layout: Layout, folder: Path | None = None) -> None:
    """ConfigError or PrivacyError where tensors travel, or stay, that the job would spoil or mistake.

    `folder` is where the job's files lie, for encodings of others.
    """
    check_down_layout(job, layout, folder)
    check_kept_layout(job, layout)
    if not isinstance(job.privacy, NoPrivacy | ExampleLevel):
        _check_noisy_layout(layout, job.privacy.level)
    if job.evaluation.every and (name := unnoised_part(job.privacy, layout)):
        raise PrivacyError(
            f"evaluation.every and the local tensor {name!r}: metrics would be of what training left at a "
            "silo, which no noise protects, however public the test data are; set evaluation.every = 0, or "
            "let all tensors travel"
        )


def _check_noisy_layout(layout: Layout, level: str) -> None:
    """Noise does to a variance what no training does: it makes it negative, and every output NaN."""
    names = [spec.name for spec in layout.averaged if spec.kind == "buffer"]
    if names:
        raise PrivacyError(
            f"privacy.level = {level!r} adds noise to all that travels, and with it go {len(names)} buffers "
            f"({', '.join(names[:3])}{', ...' if len(names) > 3 else ''}): a running variance of BatchNorm "
            "would turn negative. Use nn.GroupNorm(min(32, channels), channels) in its place, or let each "
            'silo keep its buffers: [model] buffers = "local"'
        )
