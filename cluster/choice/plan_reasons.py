"""Says why a strategy was chosen: what neighbours of each degree would take, why faster kinds do not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from roundtable.cluster.choice.search import Found, Search
from roundtable.cluster.choice.step_time import bubbles, format_seconds
from roundtable.cluster.parallel.strategy import Strategy
from roundtable.core.quantities import format_bytes

_Value = Callable[[Strategy], Any]
_DEGREES: dict[str, _Value] = {
    "tp": lambda one: one.mesh.tp,
    "pp": lambda one: one.mesh.pp,
    "fsdp": lambda one: one.mesh.fsdp,
    "virtual_stages": lambda one: one.virtual_stages,
    "micro_batch": lambda one: one.micro_batch,
}


@dataclass(frozen=True)
class Considered:
    """The best strategy of a kind: seconds of a step, bytes at the peak, and why it was not taken; empty for
    the one that was.
    """

    strategy: Strategy
    seconds: float
    peak: int
    why_not: str

    def to_plain(self) -> dict[str, Any]:
        """JSON values."""
        values = {"seconds": self.seconds, "peak": self.peak, "why_not": self.why_not}
        return {"strategy": self.strategy.to_plain(), **values}


def _kind(one: Strategy) -> tuple[Any, ...]:
    """What makes strategies one kind for people who compare them."""
    mesh, offloads = one.mesh, (one.offload, one.offload_optimizer, one.optimizer_bits)
    return one.data_parallel, mesh.tp > 1, mesh.pp > 1, offloads, one.local_steps > 0


def _is_kind(kind: tuple[Any, ...], one: Strategy) -> bool:
    return _kind(one) == kind


def considered(search: Search, chosen: Found) -> tuple[Considered, ...]:
    """The best of each kind, the chosen one first and then by time, those that do not fit last."""
    rows = []
    for kind in dict.fromkeys(_kind(one.strategy) for one in search.seen):
        best = chosen if kind == _kind(chosen.strategy) else _best(search, partial(_is_kind, kind))
        if best is not None:
            why = "" if best is chosen else _why_not(search, best, chosen)
            peak = search.needed(best).peak
            row = Considered(best.strategy, best.seconds, peak, why)
            rows.append((bool(search.problem(best)), row))
    rows.sort(key=lambda row: (bool(row[1].why_not), row[0], row[1].seconds))
    return tuple(row for _, row in rows)


def _best(search: Search, wanted: Callable[[Strategy], bool]) -> Found | None:
    return search.best_where(wanted) or search.smallest_where(wanted)


def _why_not(search: Search, one: Found, chosen: Found) -> str:
    if problem := search.problem(one):
        return problem
    if one.seconds < chosen.seconds:
        return f"{_longer(one, chosen)}, too little to be sure of: the plainer is taken"
    return _longer(one, chosen)


def _longer(one: Found, chosen: Found) -> str:
    ratio = one.seconds / chosen.seconds
    if abs(ratio - 1) < 0.0005:
        return "as fast"
    return f"{ratio - 1:.1%} slower" if ratio > 1 else f"{1 - ratio:.1%} faster"


def why_not_faster(search: Search, chosen: Found) -> Iterator[str]:
    """The kinds that would be faster, or plainer and as fast, and do not fit."""
    for kind in dict.fromkeys(_kind(one.strategy) for one in search.seen):
        those = [one for one in search.seen if _kind(one.strategy) == kind]
        fastest = min(those)
        if kind == _kind(chosen.strategy) or fastest.seconds > chosen.seconds * (1 + search.rates.near):
            continue
        if search.best_where(partial(_is_kind, kind)) is None:
            smallest = search.smallest_where(partial(_is_kind, kind))
            assert smallest is not None
            yield f"{smallest.strategy} does not fit: {search.problem(smallest)}"


def why_chosen(search: Search, chosen: Found) -> Iterator[str]:
    """A sentence for each degree: what the next smaller and the next greater one would take."""
    for name, value in _DEGREES.items():
        mine = value(chosen.strategy)
        values = sorted({value(one.strategy) for one in search.seen})
        place = values.index(mine)
        others = [values[place + step] for step in (-1, 1) if 0 <= place + step < len(values)]
        if mine == 1 and not others:
            continue
        said = [_with(search, chosen, name, value, other) for other in others]
        yield f"{name} = {mine}: " + ("; ".join(said) or "set by hand, or the only one possible")
    if chosen.strategy.mesh.pp > 1:
        waits, count = bubbles(chosen.strategy), search.micro_batches(chosen.strategy)
        yield (
            f"{chosen.strategy.schedule}: of {count} micro-batches' time stages wait for {waits:.3g} more, a "
            f"bubble of {waits / (count + waits):.1%}"
        )
    yield from _why_again(search, chosen)


def _with(search: Search, chosen: Found, name: str, value: _Value, other: Any) -> str:
    best = search.best_where(lambda strategy: value(strategy) == other)
    if best is not None:
        near = best.seconds < chosen.seconds * (1 - 1e-9)
        close = ", too little to be sure of" if near else ""
        takes = f"with {other} a step takes {format_seconds(best.seconds)} at best"
        return f"{takes}, {_longer(best, chosen)}{close}"
    smallest = search.smallest_where(lambda strategy: value(strategy) == other)
    assert smallest is not None
    return f"with {other} nothing fits, {search.problem(smallest)}"


def _why_again(search: Search, chosen: Found) -> Iterator[str]:
    """Why activations are computed again."""
    strategy = chosen.strategy
    if strategy.checkpointing == "none":
        return
    plain = Found(chosen.order, strategy.with_checkpointing("none"), chosen.time, 0.0)
    kind = f"checkpointing {strategy.checkpointing}"
    if strategy.checkpoint_blocks:
        kind += f" of {len(strategy.checkpoint_blocks)} of {len(search.probe.anatomy.blocks)} blocks"
    used = f"{format_bytes(search.needed(chosen).peak)} of {format_bytes(search.allowed)}"
    yield f"{kind} needs {used}; without it {search.problem(plain) or 'it fits'}"
