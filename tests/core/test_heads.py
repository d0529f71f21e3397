"""What a silo keeps as its own of a model that is frozen in parts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from torch import nn

from roundtable.core import JobConfig
from roundtable.core.algorithms.known_algorithms import make_algorithm
from roundtable.core.errors import ConfigError
from roundtable.core.initial_model import job_layout


def model(frozen: Sequence[int]) -> nn.Module:
    made = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))
    for place in frozen:
        made[place].requires_grad_(False)
    return made


def rules_of(name: str, frozen: Sequence[int], **settings: object) -> dict[str, str]:
    job = JobConfig.model_validate({"task": "any", "algorithm": {"name": name, **settings}})
    layout = job_layout(job, make_algorithm(job.algorithm), model(frozen))
    return {spec.name: spec.rule for spec in layout.tensors if spec.name.endswith("weight")}


@pytest.mark.parametrize("name", ["fedper", "lg_fedavg"])
def test_a_frozen_last_layer_is_no_head_of_a_silos_own(name: str) -> None:
    """It would stay the same at all silos, and what is averaged would be all that trains."""
    with pytest.raises(ConfigError, match=r"'2\.bias'.*head = "):
        rules_of(name, [2])
    with pytest.raises(ConfigError, match="both the head"):
        rules_of(name, [0, 1])
    with pytest.raises(ConfigError, match="no tensor of Sequential that trains"):
        rules_of(name, [2], head=["2.*"])


def test_what_is_frozen_is_everybodys_whatever_pattern_fits_it() -> None:
    head = rules_of("fedper", [2], head=["[12].*"])
    assert head == {"0.weight": "average", "1.weight": "local", "2.weight": "frozen"}
    base = rules_of("lg_fedavg", [0], head=["2.*"])
    assert base == {"0.weight": "frozen", "1.weight": "local", "2.weight": "average"}
