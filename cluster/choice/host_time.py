"""Counts what the host does in a step beside calling the model's operators.

FSDP2's hooks, DTensor's dispatch and the trainer's own step are Python. Layers that are split over ranks
take what a machine's ranks measure of such layers. The rest is counted in calls of small operators, whose
time ranks measure too: both are bound by the same core. The numbers
were set on torch 2.13 by CPU time, over tiny layers whose operators and collectives were taken off, and
then over the steps of benchmarks/plan_predictions.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from roundtable.cluster.choice.gradient_time import GradientTraffic
from roundtable.cluster.choice.machine_rates import MachineRates
from roundtable.cluster.choice.unit_sums import UnitSums
from roundtable.cluster.parallel.strategy import Strategy
from roundtable.cluster.plan.collective_buffers import shards_weights

# Calls that it takes to gather a unit of weights and to reduce one's gradients, with the hooks around them,
# for each unit and each of its parameters.
_GATHER, _GATHER_EACH = 45.0, 2.0
_REDUCE, _REDUCE_EACH = 90.0, 4.0
# Their share on a GPU's host, whose calls start a kernel beside: on an H100's, with torch 2.11, FSDP2 took
# 144 ms more a step for 48 blocks, and 13,700 calls of 29 µs would be 397.
_BESIDE_KERNELS = 0.35
# Those of a block that is run again; of a pipeline's schedule for a stage's micro-batch.
_AGAIN, _STAGE = 60.0, 100.0
# Of a layer that is split over ranks, of both passes and of the forward pass, where ranks measured neither.
_SPLIT, _SPLIT_AGAIN = 110.0, 45.0
# Of a weight that autocast brings to two bytes, and of its gradient on the way back.
_CAST = 1.5
# Those of a step: batches, random numbers, what ranks agree on, figures.
_STEP = 250.0


def step_calls(sums: UnitSums, strategy: Strategy, units: Sequence[str], traffic: GradientTraffic) -> float:
    """Calls of small operators that take as long as the host's own work in a step of one rank."""
    calls, here, count = _STEP, sums.blocks(units), traffic.count
    again = here if strategy.checkpointing == "sqrt" else strategy.checkpointed(here)
    calls += count * _AGAIN * len(again)
    if strategy.mesh.pp > 1:
        calls += count * _STAGE * strategy.virtual_stages
    # Gradients of later micro-batches are added to those that are there.
    calls += (count - 1) * traffic.weights.count
    if shards_weights(strategy):
        parameters = traffic.weights.count
        hooks = traffic.gathers * (_GATHER * traffic.groups + _GATHER_EACH * parameters)
        hooks += traffic.reductions * (_REDUCE * traffic.groups + _REDUCE_EACH * parameters)
        calls += hooks * (_BESIDE_KERNELS if traffic.wires.rates.overlaps else 1.0)
    elif strategy.half is not None:
        calls += count * _CAST * traffic.weights.count
    return calls


def split_seconds(
    sums: UnitSums, strategy: Strategy, units: Sequence[str], rates: MachineRates, *, last: bool
) -> float:
    """The host's own seconds for the layers that are split over ranks, in a micro-batch of one rank."""
    if strategy.mesh.tp == 1:
        return 0.0
    sequence, here = strategy.sequence_parallel, sums.blocks(units)
    again = here if strategy.checkpointing == "sqrt" else strategy.checkpointed(here)
    layers = sums.split_layers(units, rest=last, sequence=sequence)
    repeated = sums.split_layers(again, rest=False, sequence=sequence)
    name = "sequence" if sequence else "layer"
    both = rates.split.get(name, _SPLIT * rates.call)
    return layers * both + repeated * rates.split.get(f"{name} again", _SPLIT_AGAIN * rates.call)
