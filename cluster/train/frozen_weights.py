"""A task's frozen weights for the ranks of a silo: found once for a job, held to its layout's digests."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Mapping
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn

from roundtable.client.training.module_state import bit_sum, frozen_changed
from roundtable.cluster.parallel.meshes import broadcast_text, gather_text
from roundtable.cluster.parallel.shards import Places, local_of
from roundtable.cluster.train.local_state import OwnTensors
from roundtable.core.errors import ModelMismatch, RoundtableError
from roundtable.core.foundation.model_difference import pins_difference
from roundtable.core.layout import Layout
from roundtable.core.task import Task, initial_state
from roundtable.core.tensor_spec import DTYPES

Named = Iterable[tuple[str, Tensor]]


def frozen_weights(
    task: Task,
    seed: int,
    layout: Layout,
    pretrained: Mapping[str, Tensor],
    folder: Path,
    group: dist.ProcessGroup,
) -> Mapping[str, Tensor]:
    """`pretrained`, the tensors of the task's files, with all frozen tensors under their names: those that it
    has not are `frozen_beside_pretrained()` of a task that tells them, or of the model that the first rank
    makes, which the others read from a file in `folder`.

    Each frozen one is checked, one at a time. Raises ModelMismatch, on every rank, where one is not the
    job's. Collective.
    """
    if not layout.frozen:
        return pretrained
    wanted = Places(layout)
    held = {spec.name: name for spec in layout.frozen for name in wanted.names(spec) if name in pretrained}
    file = folder / f"frozen-{layout.fingerprint[:16]}.safetensors"
    trouble = ""
    if dist.get_rank() == 0:
        try:
            for spec in layout.frozen:
                if spec.name in held:
                    layout.check_frozen({spec.name: pretrained[held[spec.name]].to(DTYPES[spec.dtype])})
            if len(held) < len(layout.frozen):
                _write_made(task, seed, layout, set(held), file)
        except (RoundtableError, OSError) as error:
            trouble = str(error)
    if trouble := broadcast_text(trouble, group):
        raise ModelMismatch(trouble)
    found = {name: pretrained[known] for name, known in held.items() if name != known}
    made = OwnTensors(file) if len(held) < len(layout.frozen) else {}
    # A ChainMap reads its maps in order; the type asks for mutable ones, but nothing writes.
    return ChainMap(found, made, pretrained)  # type: ignore[arg-type]


def _write_made(task: Task, seed: int, layout: Layout, held: set[str], file: Path) -> None:
    wanted = {spec.name for spec in layout.frozen} - held
    beside: Mapping[str, Tensor] = getattr(task, "frozen_beside_pretrained", dict)()
    if told := pins_difference(beside, wanted, task):
        raise ModelMismatch(told)
    if wanted <= beside.keys():
        state = beside
    else:
        made = initial_state(task, seed)
        state = made.state_dict() if isinstance(made, nn.Module) else made
        layout.model.check(state)
    layout.check_frozen(state)
    missing = {name: state[name].detach().contiguous() for name in sorted(wanted)}
    for old in file.parent.glob("frozen-*.safetensors"):
        old.unlink(missing_ok=True)
    partial = file.with_suffix(".partial")
    safetensors.torch.save_file(missing, partial)
    partial.replace(file)


class FrozenParts:
    """Notices when training changes what a rank holds of the frozen among `tensors`, as they were loaded."""

    def __init__(self, tensors: Named, layout: Layout) -> None:
        self._any = bool(layout.frozen)
        places = Places(layout)
        self._parts = [(name, t) for name, t in tensors if places.find(name).rule == "frozen"]
        self._sums = self._now()

    def check(self) -> None:
        """Raises TaskError, on every rank, where one of them has changed. Collective."""
        if not self._any:
            return
        changed = (
            n for (n, _), was, now in zip(self._parts, self._sums, self._now(), strict=True) if was != now
        )
        if names := [name for name in gather_text(next(changed, "")) if name]:
            raise frozen_changed(names[0])

    def _now(self) -> list[int]:
        sums = [bit_sum(local_of(tensor)).cpu() for _, tensor in self._parts]
        return torch.stack(sums).tolist() if sums else []
