"""Whatever would pass by the noise of a private job, or break what it assumes, is refused before round 1."""

from __future__ import annotations

import pytest
from torch import nn

from roundtable.client.training.local_training import check_evaluation
from roundtable.core import Layout, parse_job
from roundtable.core.config import JobConfig
from roundtable.core.errors import ConfigError, PrivacyError
from roundtable.engine import Plan, make_plan
from roundtable.engine.validation.layout_composition import check_layout

SOUND = {
    "aggregation": 'weighting = "uniform"',
    "evaluation": "every = 0",
    "cohort": "size = 5",
    "privacy": 'level = "{level}"\nclip_norm = 1.0\ndelta = 1e-3\nnoise_multiplier = 2.0\n{more}',
}
LEVELS = ("client", "client_local", "dp_ftrl", "example")


def job_of(level: str, more: str = "", **tables: str) -> JobConfig:
    text = {**SOUND, **tables}
    text["privacy"] = text["privacy"].format(level=level, more=more)
    return parse_job('task = "t"\n' + "".join(f"[{name}]\n{body}\n" for name, body in text.items()))


def plan(level: str, more: str = "", **tables: str) -> Plan:
    return make_plan(job_of(level, more, **tables), 50)


@pytest.mark.parametrize("level", LEVELS)
def test_the_sound_job_is_accepted(level: str) -> None:
    plan(level)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("tables", "complaint"),
    [
        ({"aggregation": 'weighting = "examples"'}, "could claim any weight"),
        ({"cohort": 'size = 5\nstrategy = "data_size"'}, "how many examples a silo has is private"),
        ({"evaluation": "every = 1"}, "metrics of silos are exact and would pass by the noise"),
        ({"stop": 'metric = "loss"\npatience = 2'}, "metrics of silos are exact and would pass by the noise"),
    ],
)
def test_what_leaks_past_the_noise(level: str, tables: dict[str, str], complaint: str) -> None:
    with pytest.raises(PrivacyError, match=complaint):
        plan(level, **tables)


@pytest.mark.parametrize("level", LEVELS)
def test_metrics_on_public_data_are_a_statement_of_the_job(level: str) -> None:
    plan(level, "public_evaluation = true", evaluation="every = 1")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("up", "complaint"),
    [
        ('up = "topk(ratio=0.05) | int8"', "no proof of amplification by sampling covers that"),
        ('up = "sign"', "no proof of amplification by sampling covers that"),
        ('up = "topk(ratio=0.05)"\nfeedback = "off"', "how many bytes an update has depends on its values"),
        ('up = "topk(threshold=0.1)"', "how many bytes an update has depends on its values"),
    ],
)
def test_what_an_encoding_must_not_do_before_the_coordinators_noise(
    level: str, up: str, complaint: str
) -> None:
    """A silo with noise of its own encodes what is private already; random-k is scaled after the noise."""
    if level in ("client_local", "example"):
        plan(level, transfer=up)
        return
    with pytest.raises(PrivacyError, match=complaint):
        plan(level, transfer=up)
    thinned = plan(level, transfer='up = "randomk(ratio=0.1) | int8"').thinned
    assert thinned is not None
    assert thinned.factor == 10
    assert plan(level, transfer='up = "randomk(ratio=0.1, scaled=false)"\nfeedback = "off"').thinned is None
    if level == "dp_ftrl":
        with pytest.raises(PrivacyError, match="which had other places: set indices=own"):
            plan(level, transfer='up = "randomk(ratio=0.1, indices=cohort)"')


@pytest.mark.parametrize("level", ["client", "client_local", "dp_ftrl"])
@pytest.mark.parametrize(
    ("tables", "complaint"),
    [
        (
            {"aggregation": 'weighting = "uniform"\nrule = "trimmed_mean"\nparameters = {f = 1}'},
            "calibrated to the bounded mean",
        ),
        ({"aggregation": 'weighting = "uniform"\npre = [{name = "nnm", f = 1}]'}, "another sensitivity"),
        ({"cohort": "size = 5\nover_selection = 1.5"}, "who answers first is not chance"),
    ],
)
def test_what_changes_the_sensitivity_or_the_sampling(
    level: str, tables: dict[str, str], complaint: str
) -> None:
    with pytest.raises(PrivacyError, match=complaint):
        plan(level, **tables)


def test_a_cohort_larger_than_the_stated_population_is_refused() -> None:
    with pytest.raises(PrivacyError, match=r"is smaller than cohort\.size"):
        plan("client", more="population = 3")


def test_correlated_noise_refuses_sampling_by_chance_of_size() -> None:
    with pytest.raises(PrivacyError, match="cohorts of a fixed size"):
        plan("dp_ftrl", cohort='strategy = "poisson"\nprobability = 0.1')


def test_record_level_takes_no_second_clipping() -> None:
    with pytest.raises(PrivacyError, match="bounds the gradient of every example already"):
        plan("example", algorithm="max_gradient_norm = 1.0")


@pytest.mark.parametrize("strategy", ["reliability", "diversity", "round_robin"])
def test_a_strategy_that_is_not_chance_amplifies_nothing(strategy: str) -> None:
    job = {**SOUND, "cohort": f'size = 5\nstrategy = "{strategy}"'}
    job["privacy"] = job["privacy"].format(level="client", more="")
    text = 'task = "t"\n' + "".join(f"[{name}]\n{body}\n" for name, body in job.items())
    try:
        charge = make_plan(parse_job(text), 50).charge_of(1)
    except ConfigError as error:
        pytest.skip(f"{strategy}: {error}")
    assert charge is not None
    assert charge.sampling == "none"


@pytest.mark.parametrize("level", LEVELS)
def test_noise_too_small_for_a_sample_is_refused_at_once(level: str) -> None:
    poisson = {"cohort": 'strategy = "poisson"\nprobability = 0.1'} if level == "client" else {}
    privacy = SOUND["privacy"].replace("2.0", "0.001")
    if level in ("client", "example"):
        with pytest.raises(PrivacyError, match=r"noise_multiplier = 0\.001: nobody .* epsilon above 5e\+05"):
            plan(level, privacy=privacy, **poisson)
    else:
        plan(level, privacy=privacy)


@pytest.mark.parametrize("level", ["client", "dp_ftrl", "distributed", "client_local"])
def test_no_silo_changes_how_much_others_train_under_one_silos_noise(level: str) -> None:
    """SCAFFOLD's places go with noise, and its steps with speed: not both, where a sum hides one term."""
    tables = {
        "algorithm": 'name = "scaffold"\nsteps = 4\nwork = "by_speed"',
        "cohort": "size = 10" if level == "distributed" else SOUND["cohort"],
    }
    if level == "client_local":
        plan(level, **tables)
        return
    with pytest.raises(PrivacyError, match="one silo changes the updates of others as well"):
        plan(level, **tables)
    plan(level, **tables | {"algorithm": 'name = "scaffold"\nsteps = 4'})


PLAIN = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
NORMED = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


@pytest.mark.parametrize("level", [*LEVELS, "distributed"])
@pytest.mark.parametrize(("stays", "model"), [('local = ["1.*"]', PLAIN), ('buffers = "local"', NORMED)])
def test_what_stays_at_a_silo_without_noise_is_not_measured_however_public_the_data(
    level: str, stays: str, model: nn.Module
) -> None:
    job = job_of(level, "public_evaluation = true", evaluation="every = 1", model=stays)
    layout = Layout.of(model, job.model.rules())
    if level == "example" and stays.startswith("local"):
        check_layout(job, layout)
        check_evaluation(job, layout)
        return
    with pytest.raises(PrivacyError, match="which no noise protects, however public the test data are"):
        check_layout(job, layout)
    with pytest.raises(PrivacyError, match="stays at this silo without noise"):
        check_evaluation(job, layout)
    check_layout(job, Layout.of(PLAIN))
    check_layout(job_of(level, model=stays), layout)


def test_a_silo_tells_no_metrics_of_its_own_model_whatever_a_coordinator_lets_pass() -> None:
    algorithm = 'name = "ditto"\npull = 0.1'
    job = job_of("client_local", "public_evaluation = true", evaluation="every = 1", algorithm=algorithm)
    with pytest.raises(PrivacyError, match=r"'ditto' under privacy\.level = 'client_local'"):
        check_evaluation(job, Layout.of(nn.Linear(2, 1)))
