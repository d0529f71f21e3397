"""What each optimisation of memory saves in a plan, and what it costs in time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from typing_extensions import override

from roundtable.cluster.choice.search import Search
from roundtable.cluster.choice.step_time import step_time
from roundtable.cluster.parallel.strategy import Strategy
from roundtable.cluster.plan.candidates import refuse_pieces
from roundtable.cluster.plan.memory_estimate import estimate
from roundtable.core.quantities import format_bytes


@dataclass(frozen=True)
class Saving:
    """An optimisation: bytes of the fullest device that it saves, and the share by which it lengthens a step,
    both negative where it is the other way round. `used`: the plan has it, and this compares it with the same
    without; else with the plan as it is.
    """

    optimisation: str
    used: bool
    saves: int
    costs: float

    @override
    def __str__(self) -> str:
        verb = "saves" if self.saves >= 0 else "needs"
        time = f"costs {self.costs:.0%}" if self.costs >= 0 else f"gains {-self.costs:.0%}"
        return f"{self.optimisation} {verb} {format_bytes(abs(self.saves))} and {time} of a step's time"


def savings(search: Search, chosen: Strategy) -> tuple[Saving, ...]:
    """Of every optimisation that the chosen strategy has or could have."""
    return tuple(_measured(search, chosen, *each) for each in _optimisations(search, chosen))


def _optimisations(search: Search, chosen: Strategy) -> Iterator[tuple[str, Strategy, Strategy]]:
    """(its name, the strategy without it, and with it), of which one is the chosen strategy."""
    anatomy, plain = search.probe.anatomy, chosen.with_checkpointing("none")
    may = not (search.private or chosen.offload_activations or search.probe.trace.rewritten)
    if anatomy.blocks and may:
        for kind, name in (
            ("selective", "all but products"),
            ("every", "every block"),
            ("sqrt", "runs of √n"),
        ):
            if kind == "sqrt" and search.probe.cannot_run:
                continue
            yield f"checkpointing {name}", plain, chosen.with_checkpointing(kind)  # type: ignore[arg-type]
        if chosen.checkpoint_blocks:
            several = f"{len(chosen.checkpoint_blocks)} of {len(anatomy.blocks)} blocks"
            yield f"checkpointing {several}", plain, chosen
    keeps = chosen.checkpointing == "none" and chosen.mesh.pp == 1
    if search.resources.device == "cuda" and keeps and not search.private:
        without, having = (replace(chosen, offload_activations=on) for on in (False, True))
        yield "activations in CPU memory", without, having
    portable = search.probe.state_factor and search.probe.by_entry and not chosen.offload
    portable = portable and chosen.optimizer_bits == 32
    if search.resources.device == "cuda" and portable:
        without, having = (replace(chosen, offload_optimizer=on) for on in (False, True))
        yield "the optimizer in CPU memory", without, having
    coded = search.probe.state_factor and not (search.probe.cannot_code or chosen.offload_optimizer)
    if coded and not (chosen.offload or search.private):
        without, having = (replace(chosen, optimizer_bits=bits) for bits in (32, 8))
        yield "the optimizer in 8 bits", without, having
    if chosen.micro_batch > 1 and not refuse_pieces(search.probe, chosen.halved(), search.batch):
        half = chosen.halved()
        yield f"micro-batches of {half.micro_batch} instead of {chosen.micro_batch}", chosen, half
    if chosen.mesh.tp > 1 and (chosen.sequence_parallel or not search.probe.tensor_parallel.no_sequence):
        without, having = (replace(chosen, sequence_parallel=on) for on in (False, True))
        yield "sequence parallel", without, having
    yield from _sharded(search, chosen)


def _sharded(search: Search, chosen: Strategy) -> Iterator[tuple[str, Strategy, Strategy]]:
    """The next kind of data parallelism that shards more, and the one before."""
    mesh, kind = chosen.mesh, chosen.data_parallel
    if search.private or chosen.local_steps or mesh.data == 1:
        return
    ranks, exact = mesh.data, replace(chosen, reduction="exact", unused=False, offload=False)
    dense = replace(mesh, dp=ranks, fsdp=1, ep=1)
    whole = {"zero3": ("zero2", mesh), "zero2": ("ddp", dense), "zero1": ("ddp", dense)}
    names = {"zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3"}
    split = mesh.tp > 1 or mesh.pp > 1 or mesh.ep > 1
    if kind in whole and not (split and whole[kind][0] == "ddp"):
        before, shape = whole[kind]
        yield f"{names[kind]} in the place of {before}", _as(exact, before, shape), chosen
    after = {"ddp": "zero2", "zero1": "zero2", "zero2": "zero3"}.get(kind)
    if after is not None and mesh.pp == 1:
        shape = mesh if kind == "zero2" else replace(mesh, dp=1, fsdp=ranks)
        yield f"{names[after]} in the place of {kind}", chosen, _as(exact, after, shape)


def _as(strategy: Strategy, kind: str, mesh: object) -> Strategy:
    return replace(strategy, data_parallel=kind, mesh=mesh)  # type: ignore[arg-type]


def _measured(search: Search, chosen: Strategy, name: str, without: Strategy, having: Strategy) -> Saving:
    peaks, times = [], []
    for strategy in (without, having):
        peaks.append(estimate(search.probe, strategy, search.micro_batches(strategy)).peak)
        time = step_time(search.probe, search.sums, strategy, search.batch, search.rates, search.resources)
        times.append(time.seconds)
    used = chosen == having and chosen != without
    return Saving(name, used, peaks[0] - peaks[1], times[1] / times[0] - 1)
