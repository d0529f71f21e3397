"""Restricts plans to what example-level privacy allows: whole copies of a plain model."""

from __future__ import annotations

from dataclasses import replace

from roundtable.client.policy.cluster_table import ClusterTable
from roundtable.cluster.plan.memory_estimate import Estimate
from roundtable.cluster.plan.resources import Resources
from roundtable.core.config import JobConfig
from roundtable.core.errors import PrivacyError
from roundtable.core.privacy_table import ExampleLevel

_PART_OF_A_MODEL = (
    "per-example clipping needs the norm of each example's whole gradient before anything is summed, and a "
    "rank that holds part of the model has only part of it"
)
_STEP = "every rank takes the same noisy step with the whole optimizer; use ddp"
_NORMS = "the norm of an example's gradient is made of what layers keep of their forward pass"
_WHY = {
    "checkpointing": _NORMS,
    "offload_activations": _NORMS,
    "offload": "per-example gradients need the parameters where the layers run",
    "reduction": "the noise covers the exact sum of clipped gradients, and no other",
    "local_steps": "replicas that train apart would each need the noise of a whole silo",
    "optimizer_bits": "noisy gradients were not tried with a state in 8 bits",
}
_PLAIN = {
    "checkpointing": "none",
    "offload": False,
    "offload_activations": False,
    "reduction": "exact",
    "local_steps": 0,
    "optimizer_bits": 32,
}


def is_example_level(job: JobConfig) -> bool:
    """Whether each example's gradient is clipped (DP-SGD)."""
    return isinstance(job.privacy, ExampleLevel)


def narrowed(job: JobConfig, resources: Resources, table: ClusterTable) -> ClusterTable:
    """The table with what the job's privacy prescribes; unchanged where it prescribes nothing.

    Raises PrivacyError, with the reason, for what does not compose with clipping each example's gradient.
    """
    if not is_example_level(job):
        return table
    hand = table.strategy
    for key in ("tp", "pp", "fsdp", "ep"):
        if (degree := getattr(hand, key) or 1) > 1:
            raise _refused(key, degree, _PART_OF_A_MODEL)
    if hand.dp is not None and hand.dp != resources.world:
        raise _refused("dp", hand.dp, f"the other of {resources.world} devices would hold parts of the model")
    if hand.data_parallel in ("zero1", "zero2", "zero3"):
        raise _refused(
            "data_parallel", hand.data_parallel, _STEP if hand.data_parallel == "zero1" else _PART_OF_A_MODEL
        )
    for key, plain in _PLAIN.items():
        value = getattr(hand, key)
        if value is not None and value != plain:
            raise _refused(key, value, _WHY[key])
    if table.precision != "float32":
        raise PrivacyError(
            f"[cluster] precision = {table.precision!r} with privacy.level = 'example': clipped gradients "
            "are checked against plain backward passes, which it is too coarse for; use float32"
        )
    degrees = {"tp": 1, "pp": 1, "fsdp": 1, "ep": 1, "dp": resources.world}
    kind = {"data_parallel": "ddp" if resources.world > 1 else "none", "sequence_parallel": False}
    return table.model_copy(update={"strategy": hand.model_copy(update={**degrees, **kind, **_PLAIN})})


def with_noisy_gradient(estimate: Estimate) -> Estimate:
    """The estimate with a second copy of the gradients: the noisy gradient beside the sum of clipped ones."""
    copy = estimate.gradients
    return replace(estimate, gradients=estimate.gradients + copy, peak=estimate.peak + copy)


def _refused(key: str, value: object, reason: str) -> PrivacyError:
    return PrivacyError(f"[cluster.strategy] {key} = {value}, and privacy.level = 'example': {reason}")
