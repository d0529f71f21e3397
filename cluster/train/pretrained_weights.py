"""Reads a task's pretrained weights under the names of the model in memory, whatever names their file has."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from typing_extensions import override

from roundtable.cluster.parallel.meta_init import model_on_meta
from roundtable.core.errors import EncodingError, LayoutError
from roundtable.core.foundation.checkpoint_files import CheckpointTensors
from roundtable.core.task import Task

_WRAPPED = ".base_layer."
"""What peft puts into the names of a layer that it adapts."""
_THERE = torch.empty(0)


def pretrained_weights(path: Path, task: Task) -> Mapping[str, Tensor]:
    """The tensors of a safetensors file, or of a folder's with an index; renamed and converted where
    transformers publishes its model so. Each is read when it is asked for. LayoutError for no checkpoint."""
    try:
        file = CheckpointTensors(path)
    except EncodingError as error:
        raise LayoutError(f"the task's pretrained weights: {error}") from error
    library = sys.modules.get("transformers")
    if library is None:
        return file
    model = model_on_meta(task)
    if file.keys() <= model.state_dict(keep_vars=True).keys():
        return file
    for name, part in model.named_modules():
        if isinstance(part, library.PreTrainedModel):
            return ConvertedWeights(file, cast(Any, part), f"{name}." if name else "")
    return file


@dataclass(frozen=True)
class _Conversion:
    """Tensors of the file, as (new name, own name, pattern), that a transform makes others of."""

    transform: Any
    first: str
    sources: list[tuple[str, str, str]]


class ConvertedWeights(Mapping[str, Tensor]):
    """The tensors of a file of transformers' by the names that its model has in memory, after `prefix`.

    Releases of the library rename, merge and split weights while they load. Its own conversion map says how;
    each tensor is made when it is asked for, of those alone that it is made of.
    """

    def __init__(self, file: Mapping[str, Tensor], model: Any, prefix: str) -> None:
        """Raises LayoutError where the library cannot convert the file."""
        # The library is the task's; it is here where the model is one of its own.
        core_model_loading: Any = import_module("transformers.core_model_loading")
        conversion_mapping: Any = import_module("transformers.conversion_mapping")
        self._file = file
        self._model = model
        self._prefix = prefix
        self._own: dict[str, str] = {}
        self._made: dict[str, _Conversion] = {}
        transforms = conversion_mapping.get_model_conversion_mapping(self._model)
        renamings = [each for each in transforms if isinstance(each, core_model_loading.WeightRenaming)]
        converters = [each for each in transforms if isinstance(each, core_model_loading.WeightConverter)]
        by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        # A layer with an adapter has its weights one name further down.
        wrapped = {name.replace(_WRAPPED, "."): name for name in self._model.state_dict()}
        there = dict.fromkeys(wrapped, _THERE)
        conversions: dict[str, _Conversion] = {}
        # Experts in the order of their numbers.
        for name in sorted(file, key=core_model_loading.dot_natural_key):
            new, pattern = core_model_loading.rename_source_key(
                name, renamings, converters, self._model.base_model_prefix, there
            )
            if pattern is None:
                self._own[prefix + wrapped.get(new, new)] = name
                continue
            conversion = conversions.setdefault(new, _Conversion(by_pattern[pattern], new, []))
            conversion.sources.append((new, name, pattern))
        for conversion in conversions.values():
            for made in self._convert(conversion, meta=True):
                self._made[prefix + wrapped.get(made, made)] = conversion

    @override
    def __getitem__(self, name: str) -> Tensor:
        if name in self._made:
            return self._convert(self._made[name])[name.removeprefix(self._prefix).replace(_WRAPPED, ".")]
        return self._file[self._own.get(name, name)]

    @override
    def __iter__(self) -> Iterator[str]:
        return iter({*self._own, *self._made, *self._file})

    @override
    def __len__(self) -> int:
        return len({*self._own, *self._made, *self._file})

    def _convert(self, conversion: _Conversion, *, meta: bool = False) -> dict[str, Tensor]:
        """What a conversion makes; with `meta` its names and shapes alone."""
        transform = deepcopy(conversion.transform)
        for new, name, pattern in conversion.sources:
            tensor = self._file[name]
            transform.add_tensor(new, name, pattern, tensor.to("meta") if meta else tensor)
        try:
            made = transform.convert(conversion.first, model=self._model, config=self._model.config)
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            raise LayoutError(
                f"transformers cannot convert {conversion.sources[0][1]!r} of the pretrained file to "
                f"{conversion.first!r}: {error}; write the file from the model in memory "
                "(safetensors.torch.save_model)"
            ) from error
        return {key: value[0] if isinstance(value, list) else value for key, value in made.items()}
