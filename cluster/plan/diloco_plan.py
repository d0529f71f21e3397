"""Whether a silo's nodes train apart and meet now and then: where reducing gradients would rule each step.

From figures alone: the arithmetic of a step over the products that a device was measured to do, and the
gradients' bytes over the bandwidth that was measured between the nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from roundtable.client.policy.cluster_table import ClusterTable
from roundtable.cluster.plan.links import Links
from roundtable.cluster.plan.memory_estimate import ModelProbe
from roundtable.cluster.plan.resources import Resources
from roundtable.core.config import JobConfig

# Of the rate of plain matrix products, what training a model comes to.
_EFFICIENCY = 0.5
# Reduction over computation of a step: from where on nodes train apart, and what is left of it then.
DOMINATES, _LEFT = 4.0, 0.1
# Seconds of reducing in a step below which there is nothing to gain.
_WORTH = 0.01
# As many as Douillard et al. 2023 take by default.
_MOST = 500
# Fewer meetings in a life of the outer optimizer than this gather no momentum worth the name.
_MEETINGS = 10
_RATE, _MOMENTUM = 0.7, 0.9


@dataclass(frozen=True)
class StepCosts:
    """Seconds of one step: `computing`, and `reducing` its gradients between nodes."""

    computing: float
    reducing: float


def costs(
    probe: ModelProbe, resources: Resources, job: JobConfig, links: Links | None, precision: str
) -> StepCosts | None:
    """None where there is one node, or the links or the devices were not measured."""
    nodes, batch = resources.nodes, job.algorithm.batch_size
    if nodes == 1 or links is None or not links.between or not links.products or not probe.flops:
        return None
    rate = links.products.get(precision) or max(links.products.values())
    computing = probe.flops * batch / (resources.world * rate * _EFFICIENCY)
    trained = sum(weight.elements * weight.itemsize for weight in probe.anatomy.weights if weight.trainable)
    # Each device of a node reduces its part with those in its place on the others, all at once.
    part = trained / resources.devices
    return StepCosts(computing, part * 2 * (nodes - 1) / nodes / max(links.between.values()))


def apart(
    probe: ModelProbe, resources: Resources, job: JobConfig, table: ClusterTable, links: Links | None
) -> tuple[ClusterTable | None, str]:
    """The table for nodes that train apart, and why; None where they need not, or must not.

    What `[cluster.strategy]` sets stays, and `local_steps = 0` forbids it.
    """
    found = costs(probe, resources, job, links, table.precision)
    hand = table.strategy
    if (
        found is None
        or hand.local_steps is not None
        or found.reducing < max(_WORTH, DOMINATES * found.computing)
    ):
        return None, ""
    waits = found.reducing / found.computing
    said = (
        f"reducing a step's gradients between nodes would take {found.reducing:.2g} s, {waits:.3g} times the "
        f"{found.computing:.2g} s that it computes"
    )
    if refusal := _refusal(resources, job, table):
        return None, f"{said}, but nodes cannot train apart: {refusal}"
    steps = min(_MOST, ceil(waits / _LEFT))
    rate, momentum = _outer(job, steps)
    update = {
        "dp": resources.nodes,
        "pp": 1,
        "local_steps": steps,
        "outer_learning_rate": hand.outer_learning_rate or rate,
        "outer_momentum": momentum if hand.outer_momentum is None else hand.outer_momentum,
        "reduction": "exact",
        "offload": False,
    }
    kept = table.model_copy(update={"strategy": hand.model_copy(update=update)})
    return kept, f"{said}: nodes train apart and meet every {steps} steps (local_steps = 0 forbids it)"


def _outer(job: JobConfig, steps: int) -> tuple[float, float]:
    """DiLoCo's outer optimizer where its momentum has time to build up, else the mean (local SGD)."""
    meetings = (job.algorithm.steps or 0) / steps
    lasts = job.algorithm.optimizer_state == "keep" or meetings >= _MEETINGS
    return (_RATE, _MOMENTUM) if lasts else (1.0, 0.0)


def _refusal(resources: Resources, job: JobConfig, table: ClusterTable) -> str:
    """Why not, in what is set by hand or in the job."""
    hand, nodes = table.strategy, resources.nodes
    if job.algorithm.batch_size < nodes:
        return f"a batch of {job.algorithm.batch_size} has no example for each of {nodes} nodes"
    if hand.dp not in (None, nodes):
        return f"dp = {hand.dp} is set, and each of {nodes} nodes would be a replica"
    for key, plain in (("pp", 1), ("reduction", "exact"), ("offload", False)):
        if (value := getattr(hand, key)) not in (None, plain):
            return f"{key} = {value} is set"
    if hand.data_parallel == "zero1":
        return "data_parallel = zero1 is set, whose ranks share one optimizer's state out"
    return ""
