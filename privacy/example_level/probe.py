"""Which way to per-example gradients is right for a model, and then fastest: two steps of each decide."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from roundtable.core.errors import PrivacyError
from roundtable.privacy.example_level.bookkeeping import BookKeeping
from roundtable.privacy.example_level.checks import Fetch, check_sums, clipping_norm, sums_one_by_one
from roundtable.privacy.example_level.opacus_sums import INSTANTIATING, opacus_sum
from roundtable.privacy.example_level.opacus_sums import MODES as OPACUS_MODES
from roundtable.privacy.example_level.per_example_clipping import ClippedSum, LossFunction, UnsupportedModel

MODES = (BookKeeping.name, *OPACUS_MODES)
_CHECKED_EXAMPLES = 8
_MEMORY_LIMIT = 1 << 30
# Opacus takes seconds to load, and two steps are a rough measure: neither is for a small gain.
_SHORT_STEP, _CLEARLY_FASTER = 2e-3, 0.85


def choose(
    model: nn.Module,
    loss_fn: LossFunction,
    fetch: Fetch,
    dataset_size: int,
    batch_size: int,
    clip_norm: float,
    mode: str = "auto",
) -> ClippedSum:
    """The first of `MODES` that gives the right sums for this model, a clearly faster one, or the one named.

    Each is first checked against one backward pass for each of a few examples, with the job's clip norm and
    with one that clips most of them. Modes that would hold more than a gibibyte of per-example gradients are
    left out. Raises `PrivacyError` with every mode's reason where none works.
    """
    if mode not in ("auto", "first", *MODES):
        raise PrivacyError(
            f"the mode of per-example gradients is {mode!r}; choose auto, first or one of {', '.join(MODES)}"
        )
    # Data are often sorted, by class or by length: neighbours would show nothing.
    places = torch.linspace(0, dataset_size - 1, min(_CHECKED_EXAMPLES, dataset_size))
    examples = places.round().long().tolist()
    model.train()
    devices = [p.device for p in model.parameters() if p.device.type == "cuda"][:1]
    with torch.random.fork_rng(devices=devices):
        clipping = clipping_norm(model, loss_fn, fetch, examples, clip_norm)
        expected = {
            norm: sums_one_by_one(model, loss_fn, fetch, examples, norm) for norm in {clip_norm, clipping}
        }

        def checked(name: str, norm: float) -> ClippedSum:
            candidate = _attach(name, model, loss_fn, norm)
            try:
                check_sums(candidate, model, expected[norm], fetch(torch.tensor(examples)), len(examples))
            except UnsupportedModel:
                candidate.close()
                raise
            return candidate

        def attach(name: str) -> ClippedSum:
            _check_memory(name, model, batch_size)
            if clipping != clip_norm:
                checked(name, clipping).close()
            return checked(name, clip_norm)

        batch = fetch(torch.arange(batch_size))
        names = MODES if mode in ("auto", "first") else (mode,)
        return _fastest(attach, model, lambda: batch, batch_size, names, mode != "auto")


def _fastest(
    attach: Callable[[str], ClippedSum],
    model: nn.Module,
    batch: Callable[[], object],
    size: int,
    names: tuple[str, ...],
    first: bool,
) -> ClippedSum:
    reasons, times = [], {}
    for name in names:
        try:
            candidate = attach(name)
        except UnsupportedModel as error:
            reasons.append(f"{name}: {error}")
            continue
        if first:
            return candidate
        times[name] = _time_two_steps(candidate, model, batch(), size)
        candidate.close()
        if times[name] < _SHORT_STEP:
            break
    if not times:
        raise PrivacyError("no way to per-example gradients works for this model. " + "; ".join(reasons))
    best = next(iter(times))
    for name, seconds in times.items():
        if seconds < _CLEARLY_FASTER * times[best]:
            best = name
    return attach(best)


def _check_memory(name: str, model: nn.Module, batch_size: int) -> None:
    needed = batch_size * sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    if name in INSTANTIATING and needed > _MEMORY_LIMIT:
        raise UnsupportedModel(
            f"{needed / 2**30:.1f} GiB of per-example gradients for {batch_size} examples; lower "
            "physical_batch"
        )


def _time_two_steps(candidate: ClippedSum, model: nn.Module, batch: object, size: int) -> float:
    sums = {p: torch.zeros_like(p) for p in model.parameters() if p.requires_grad}
    best = float("inf")
    for _ in range(2):
        start = _now(sums)
        candidate.accumulate(batch, size, sums)
        best = min(best, _now(sums) - start)
    return best


def _now(sums: Mapping[nn.Parameter, Tensor]) -> float:
    """Processor time on a CPU, where other work may take turns; on a GPU the time at which it is done."""
    first = next((p for p in sums if p.is_cuda), None)
    if first is not None:
        torch.cuda.synchronize(first.device)
        return time.perf_counter()
    return time.process_time()


def _attach(name: str, model: nn.Module, loss_fn: LossFunction, clip_norm: float) -> ClippedSum:
    if name == BookKeeping.name:
        return BookKeeping(model, loss_fn, clip_norm)
    return opacus_sum(name, model, loss_fn, clip_norm)
