"""The flat vector of a job: its model under the layout's rules, and the algorithm's places behind it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from glob import escape

import torch
from torch import Tensor, nn

from roundtable.core.algorithms.contract import ClientAlgorithm
from roundtable.core.layout import Layout, LayoutRules


def algorithm_layout(
    rules: LayoutRules, algorithm: ClientAlgorithm, made: nn.Module | Mapping[str, Tensor]
) -> Layout:
    """The layout that every party to the job derives from the task's model, alike to the last place."""
    own = algorithm.local_tensors(made) if isinstance(made, nn.Module) else ()
    if own:
        rules = replace(rules, local=(*rules.local, *map(escape, own)))
    layout = Layout.of(made, rules)
    if not algorithm.places:
        return layout
    shapes: list[dict[str, tuple[int, ...]]] = [{}, {}]
    for place in algorithm.places:
        shapes[not place.sent][place.name] = (layout.size,) if place.shape is None else place.shape
    return layout.with_places(*shapes)


def initial_vector(layout: Layout, made: nn.Module | Mapping[str, Tensor]) -> Tensor:
    """The model's values, and zeros in the algorithm's places: float32 [layout.size]."""
    if not layout.places:
        return layout.flatten(made)
    vector = torch.zeros(layout.size)
    layout.model.flatten(made, vector[: layout.model.size])
    return vector
