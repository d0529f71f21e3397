"""The way to a model: the shortest chain from one that is here, as long as the whole is not shorter."""

from __future__ import annotations

import itertools

import pytest

from roundtable.client.door.model_names import ArtifactName, ModelHop
from roundtable.client.model_route import ModelRoute

NAMES = [f"{number:032x}" for number in range(6)]
HOPS = [
    ModelHop(base, model, ArtifactName(f"{place:064x}", 10))
    for place, (base, model) in enumerate(itertools.pairwise(NAMES))
]
NEWEST = ArtifactName(NAMES[-1] + "0" * 32, 35)


@pytest.mark.parametrize(
    ("held", "length"), [({4}, 1), ({3}, 2), ({1, 3}, 2), ({2}, 3), ({1}, 0), (set(), 0)]
)
def test_the_chain_begins_at_the_nearest_model_that_is_here(held: set[int], length: int) -> None:
    route = ModelRoute.of("int4", HOPS)
    assert route is not None
    found = route.to(NEWEST, {NAMES[place] for place in held}.__contains__)
    assert found == tuple(HOPS[len(HOPS) - length :] if length else ())


def test_hops_that_lead_in_circles_or_elsewhere_lead_nowhere() -> None:
    circle = [ModelHop(NAMES[1], NAMES[5], HOPS[0].delta), ModelHop(NAMES[5], NAMES[1], HOPS[1].delta)]
    for hops in (circle, HOPS[:2]):
        route = ModelRoute.of("int4", hops)
        assert route is not None
        assert route.to(NEWEST, lambda name: False) == ()
    assert ModelRoute.of("float32", HOPS) is None
    assert ModelRoute.of("int4", ()) is None
