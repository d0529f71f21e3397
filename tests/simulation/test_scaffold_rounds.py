"""SCAFFOLD where updates are clipped, masked or noised: what c is then, and what it is made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import algorithm_table as table
import pytest
import torch
from algorithm_tasks import Plain
from safetensors.torch import load_file
from torch import Tensor

from roundtable.core import JobConfig
from roundtable.core.algorithms.contract import ClientRound
from roundtable.core.algorithms.known_algorithms import make_algorithm
from roundtable.core.algorithms.round_context import Context
from roundtable.core.algorithms.scaffold import ScaffoldTable
from roundtable.core.errors import ConfigError, PrivacyError
from roundtable.core.initial_model import initial_model
from roundtable.core.layout import Layout
from roundtable.engine import make_plan
from roundtable.simulation import Result, simulate

MASKED = {"level": "none", "secure_aggregation": True, "clip_norm": 0.15}
NOISY = {"level": "client", "clip_norm": 0.15, "noise_multiplier": 1.0, "delta": 1e-5}
STEPS, EPOCHS = {"steps": 4}, {"usual_steps": 4}


def run(algorithm: dict[str, Any], folder: Path | None = None, **tables: Any) -> Result:
    document: dict[str, Any] = {
        "task": "t",
        "rounds": 3,
        "seed": 5,
        "algorithm": {"name": "scaffold", "learning_rate": 0.1, "batch_size": 8, **algorithm},
        "aggregation": {"weighting": "uniform"},
        "evaluation": {"every": 0},
        "cohort": {"size": 4},
        "simulation": {"clients": 4, "backend": "sequential"},
    }
    return simulate(JobConfig.model_validate({**document, **tables}), Plain(), run_dir=folder)


def control(result: Result) -> Tensor:
    return result.model.vector[result.model.layout.places["control"]]


def released(result: Result) -> Tensor:
    """What the model moved by in the only round."""
    before = initial_model(result.job, Plain(), make_algorithm(result.job.algorithm))
    return (result.model.vector - before.vector)[: result.model.layout.model.size]


def kept(folder: Path) -> list[Tensor]:
    files = sorted((folder / "state").glob("local-*.safetensors"))
    return [load_file(file)["algorithm/control"] for file in files]


@pytest.mark.parametrize("cohort", [4, 3])
@pytest.mark.parametrize("algorithm", [STEPS, EPOCHS], ids=["steps", "epochs"])
@pytest.mark.parametrize("masked", [False, True])
def test_c_is_the_mean_of_what_clients_keep(
    algorithm: dict[str, Any], masked: bool, cohort: int, tmp_path: Path
) -> None:
    """Equation 5's invariant, also where every update is clipped: a client keeps what counts of its own."""
    tables = {"privacy": MASKED} if masked else {}
    result = run(algorithm, tmp_path, cohort={"size": cohort}, **tables)
    if masked:
        assert result.history.records[0].charge["clipped"] == cohort
    means = torch.stack(kept(tmp_path)).sum(0) / 4
    assert means.abs().max() > 0.01
    # The ring rounds each value to 0.15 / 2¹³ at worst; η‖a‖₁ = 0.4 of it is a step.
    torch.testing.assert_close(control(result), means, rtol=1e-5, atol=1e-5 if not masked else 5e-5)


def test_under_noise_c_follows_from_the_released_models_alone() -> None:
    """So it costs nothing beside them. A round of 4 expected of 4: c = −(x₁ − x₀)/(ηK)."""
    result = run(STEPS, rounds=1, privacy=NOISY)
    layout = result.model.layout
    assert layout.sent.size == layout.model.size
    moved = released(result)
    torch.testing.assert_close(control(result), -moved / (0.1 * 4), rtol=1e-4, atol=1e-5)


def test_how_many_took_part_is_not_in_a_noisy_model() -> None:
    """Poisson cohorts are a secret: c goes by the number that was expected."""
    draw = {"strategy": "poisson", "probability": 0.5}
    result = run(STEPS, rounds=1, cohort=draw, privacy=NOISY)
    moved = released(result)
    # x moves by the sum over 2 that are expected; c by half of the mean of −Δ/(ηK) over those.
    torch.testing.assert_close(control(result), -0.5 * moved / (0.1 * 4), rtol=1e-4, atol=1e-5)


def test_what_goes_along_is_clipped_in_one_norm_with_the_update() -> None:
    algorithm = make_algorithm(ScaffoldTable(name="scaffold", learning_rate=0.1, usual_steps=4))
    vector, update = torch.zeros(3), torch.tensor([3.0, -4.0, 0.0])
    round = ClientRound(
        Context("job", 1, "a"),
        algorithm.step(),
        0.1,
        vector,
        {"control": vector},
        {},
        Layout.of({"w": vector}),
        [slice(0, 3)],
        bound=2.0,
    )
    sent = algorithm.end(round, update, 2)
    torch.testing.assert_close(sent.up["control"], sent.update * 2)
    whole = torch.cat([sent.update, sent.up["control"]])
    torch.testing.assert_close(whole.norm(), torch.tensor(2.0))
    torch.testing.assert_close(sent.kept["control"], -sent.update / (0.1 * 2))


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"privacy": {**NOISY, "clipping": "adaptive"}}, "clipping = 'adaptive'.*cannot know that before"),
        (
            {"aggregation": {"weighting": "uniform", "validation": {"policy": "clip", "max_norm": 1.0}}},
            "clip",
        ),
        ({"privacy": {**NOISY, "level": "example", "local_steps": 3}}, "set algorithm.steps in its place"),
        ({"algorithm": {"name": "scaffold"}, "privacy": MASKED}, "or set algorithm.steps or usual_steps"),
    ],
)
def test_what_would_part_c_from_its_clients_is_refused(tables: dict[str, Any], said: str) -> None:
    document = {**table.document_of("scaffold"), **tables}
    with pytest.raises((ConfigError, PrivacyError), match=said):
        make_plan(JobConfig.model_validate(document), 8)
