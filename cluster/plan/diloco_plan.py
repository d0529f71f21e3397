"""Decides whether a silo's nodes train apart and average now and then (DiLoCo, Douillard et al. 2023).

They do where reducing gradients between nodes would take most of each step: by the operations of a step over
the rate of matrix products measured on a device, and the gradients' bytes over the bandwidth measured between
nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from roundtable.client.policy.cluster_table import ClusterTable
from roundtable.cluster.plan.links import Links
from roundtable.cluster.plan.memory_estimate import ModelProbe
from roundtable.cluster.plan.resources import Resources
from roundtable.core.config import JobConfig

# The share of the rate of plain matrix products that training a model reaches.
_EFFICIENCY = 0.5
# Seconds of reduction for each second of computation: from here on nodes train apart, at most so much then.
DOMINATES, _LEFT = 4.0, 0.1
# Seconds of reducing in a step below which there is nothing to gain.
_WORTH = 0.01
# The most steps between two meetings: the default of Douillard et al. 2023.
_MOST = 500
# With fewer meetings than this in its life, the outer optimizer gathers no momentum worth the name.
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
    """The costs of a step; None where there is one node, or links or devices were not measured."""
    nodes, batch = resources.nodes, job.algorithm.batch_size
    if nodes == 1 or links is None or not links.between or not links.products or not probe.flops:
        return None
    rate = links.products.get(precision) or max(links.products.values())
    computing = probe.flops * batch / (resources.world * rate * _EFFICIENCY)
    trained = sum(weight.elements * weight.itemsize for weight in probe.anatomy.weights if weight.trainable)
    # Each device of a node reduces its part with those in its place on the others, all at once.
    part = trained / resources.devices
    return StepCosts(computing, part * 2 * (nodes - 1) / nodes / max(links.between.values()))


def diloco_table(
    probe: ModelProbe, resources: Resources, job: JobConfig, table: ClusterTable, links: Links | None
) -> tuple[ClusterTable | None, str]:
    """(the table for nodes that train apart, the reason); the table is None where they need or may not.

    What `[cluster.strategy]` sets stays, and `local_steps = 0` forbids training apart.
    """
    step = costs(probe, resources, job, links, table.precision)
    hand = table.strategy
    if step is None or hand.local_steps is not None:
        return None, ""
    if step.reducing < max(_WORTH, DOMINATES * step.computing):
        return None, ""
    ratio = step.reducing / step.computing
    reason = (
        f"reducing a step's gradients between nodes would take {step.reducing:.2g} s, {ratio:.3g} times the "
        f"{step.computing:.2g} s that it computes"
    )
    if refusal := _refusal(resources, job, table):
        return None, f"{reason}, but nodes cannot train apart: {refusal}"
    steps = min(_MOST, ceil(ratio / _LEFT))
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
    return kept, f"{reason}: nodes train apart and meet every {steps} steps (local_steps = 0 forbids it)"


def _outer(job: JobConfig, steps: int) -> tuple[float, float]:
    """(learning rate, momentum): DiLoCo's outer optimizer where momentum can build up, else the mean."""
    meetings = (job.algorithm.steps or 0) / steps
    lasts = job.algorithm.optimizer_state == "keep" or meetings >= _MEETINGS
    return (_RATE, _MOMENTUM) if lasts else (1.0, 0.0)


def _refusal(resources: Resources, job: JobConfig, table: ClusterTable) -> str:
    """Why nodes cannot train apart, from the table and the job; empty where they can."""
    hand, nodes = table.strategy, resources.nodes
    if job.algorithm.batch_size < nodes:
        return f"a batch of {job.algorithm.batch_size} has no example for each of {nodes} nodes"
    if hand.dp not in (None, nodes):
        return f"dp = {hand.dp} is set, and each of {nodes} nodes would be a replica"
    for key, plain in (("pp", 1), ("reduction", "exact"), ("offload", False)):
        if (value := getattr(hand, key)) not in (None, plain):
            return f"{key} = {value} is set"
    if table.shares == "measured":
        return "shares = measured is set, and replicas that train apart count alike when they meet"
    if hand.data_parallel == "zero1":
        return "data_parallel = zero1 is set, whose ranks share one optimizer's state out"
    return ""
