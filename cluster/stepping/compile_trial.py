"""Tries compiled blocks in a job's first steps, keeps them where steps get shorter, and remembers that."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from roundtable.client.durable_files import replace_synced
from roundtable.cluster.parallel.meshes import broadcast_text, gather_text
from roundtable.cluster.parallel.strategy import Strategy
from roundtable.cluster.stepping.compiled_blocks import CompiledBlocks

FILE = "compiled.json"
# Steps that are timed plain and compiled; what is passed over before, as compiling and caches take it.
_STEPS, _WARM = 4, 2
# The share of a step that compiled blocks must save.
GAIN = 0.03
_KEPT = 200
APART = "replicas that come and go would each try by themselves"
STATISTICS = "layers in them exchange or choose their batch's statistics"
_TRYING = "the ranks ended while compiled blocks were tried"


def cannot_compile(strategy: Strategy, blocks: int, *, private: bool) -> str:
    """Why blocks are not compiled; empty where they can be."""
    mesh = strategy.mesh
    if not blocks:
        return "the model has no repeated blocks"
    if private:
        return "per-example gradients are taken by hooks on single layers"
    if mesh.tp > 1 or mesh.pp > 1 or mesh.ep > 1:
        return "layers that tp, pp or ep share out exchange parts within a block"
    if strategy.checkpointing != "none" or strategy.offload_activations:
        return "checkpointing and offload_activations decide what a pass keeps, and so would the compiler"
    return ""


class TrialMemory:
    """What came of trials, in a file of the cluster's state folder, by model, strategy and machine."""

    def __init__(self, folder: Path, key: Sequence[str], control: dist.ProcessGroup) -> None:
        self._file = folder / FILE
        self._key = hashlib.blake2b("\n".join(key).encode(), digest_size=16).hexdigest()
        self._control = control

    def read(self) -> tuple[bool, str] | None:
        """(on, why) as it was remembered; None where it was not tried. Collective."""
        kept = self._all().get(self._key) if dist.get_rank() == 0 else None
        found = json.loads(broadcast_text(json.dumps(kept), self._control))
        return None if found is None else (bool(found[0]), str(found[1]))

    def write(self, on: bool, why: str) -> None:
        """Remembers it; only the first rank writes."""
        if dist.get_rank() == 0:
            kept = {**self._all(), self._key: (on, why)}
            replace_synced(self._file, [json.dumps(dict(list(kept.items())[-_KEPT:])).encode()], many=True)

    def gathered(self, values: tuple[float, float, str]) -> list[tuple[float, float, str]]:
        """All ranks' values; collective."""
        return [tuple(json.loads(each)) for each in gather_text(json.dumps(values), self._control)]

    def _all(self) -> dict[str, tuple[bool, str]]:
        try:
            kept = json.loads(self._file.read_bytes())
        except (OSError, ValueError):
            return {}
        return kept if isinstance(kept, dict) else {}


class CompileTrial:
    """Follows the steps of a job on every rank, which all see the same number of them. Collective.

    `said` tells how it stands, for the round's report.
    """

    def __init__(self, blocks: CompiledBlocks, memory: TrialMemory) -> None:
        self._blocks = blocks
        self._memory = memory
        self._passing = _WARM
        self._plain: list[float] = []
        self._compiled: list[float] = []
        known = memory.read()
        self._settled = known is not None
        self.said = "blocks are being tried compiled"
        if known is not None:
            on, self.said = known
            if on:
                blocks.turn_on()

    def note(self, seconds: float) -> None:
        """A step took so long."""
        if self._blocks.failed and self._settled:
            self.said = f"blocks are plain: the compiler failed: {self._blocks.failed}"
        if self._settled:
            return
        self._passing -= 1
        if self._passing >= 0:
            return
        if len(self._plain) < _STEPS:
            self._plain.append(seconds)
            if len(self._plain) == _STEPS:
                # Found by the next start, if this one ends here.
                self._memory.write(False, f"blocks are plain: {_TRYING}")
                self._blocks.turn_on()
                self._passing = _WARM
            return
        self._compiled.append(seconds)
        if len(self._compiled) == _STEPS:
            self._settle()

    def _settle(self) -> None:
        own = statistics.median(self._plain), statistics.median(self._compiled), self._blocks.failed
        found = self._memory.gathered(own)
        plain, compiled = max(each[0] for each in found), max(each[1] for each in found)
        failed = next((each[2] for each in found if each[2]), "")
        on = not failed and compiled < plain * (1 - GAIN)
        if failed:
            self.said = f"blocks are plain: the compiler failed: {failed}"
        else:
            times = f"a step took {compiled:.3g} s with compiled blocks, {plain:.3g} s without"
            self.said = f"blocks are {'compiled' if on else 'plain'}: {times}"
        if not on:
            self._blocks.turn_off()
        self._settled = True
        self._memory.write(on, self.said)


def why_plain(mode: str, device: str, refusal: str) -> str:
    """Why blocks are not even tried; empty where they are. `mode` is `[cluster] compile`."""
    if mode == "never":
        return "blocks are plain: compile = never"
    if refusal:
        return f"blocks are plain: {refusal}"
    if mode == "auto" and device == "cpu":
        return "blocks are plain: on CPUs they are tried compiled with compile = try alone"
    return ""


def begin_trial(
    mode: str, device: torch.device, blocks: CompiledBlocks, refusal: str, memory: TrialMemory
) -> CompileTrial | str:
    """The trial that `[cluster] compile` wants, or why there is none. Collective."""
    return why_plain(mode, device.type, refusal) or CompileTrial(blocks, memory)
