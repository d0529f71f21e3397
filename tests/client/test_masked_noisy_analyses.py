"""Masks over the noise of silos: the total is that of the noisy sums, and each silo pays as without masks."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federation import NAMES
from noisy_silos import SURVEY, answered, write

from roundtable.client.policy.analysis_rules import AnalysesTable, asked_columns
from roundtable.client.policy.policy_table import PolicyTable
from roundtable.client.policy.privacy_rules import privacy_objections
from roundtable.core import parse_job
from roundtable.core.analyses.exact_sums import Doubles
from roundtable.core.config import JobConfig
from roundtable.core.errors import AggregationError, ConfigError, InvalidUpdate, PrivacyError, ProtocolError
from roundtable.engine.validation.round_plan import make_plan
from roundtable.privacy import SecureRound
from roundtable.privacy.example_level import SiloAccount
from roundtable.privacy.secagg import ArraySource, ServerPhase, VectorSource, plain_sum, run_in_memory
from roundtable.simulation import simulate
from roundtable.surveys import analyse, load_survey, survey_job, survey_plan

MASKED = "secure_aggregation = true\n" + SURVEY


def masked_job(folder: Path, silos: int = 3) -> JobConfig:
    return survey_job(load_survey(write(folder, MASKED)).model_copy(update={"silos": {}}), silos)


def released(job: JobConfig, folder: Path, silos: int = 3, attempt: int = 1) -> list[Any]:
    """The noisy digits of each silo, which leave it masked; each has an account of its own."""
    return [
        answered(job, folder / str(silo), attempt, folder / f"{NAMES[silo % 3]}.csv").delta
        for silo in range(silos)
    ]


def opened(job: JobConfig, round: SecureRound, total: np.ndarray, silos: int = 3) -> dict[str, Doubles]:
    """The sums in an opened total, as the coordinator reads them."""
    places = job.algorithm.survey.sum_places  # type: ignore[attr-defined]
    size = places.size
    return dict(places.decode(round.decode(total, silos, silos).vector[-size:], silos))


def test_what_opens_is_the_sum_of_the_noisy_vectors_whoever_is_lost_and_asked_again(tmp_path: Path) -> None:
    """In the ring, in the clear and by fractions; after an attempt that lost a silo, and one that loses it
    behind its vector. Who is asked again masks the same bits under other masks."""
    job = masked_job(tmp_path, 5)
    first = released(job, tmp_path, 5)
    round = SecureRound.of(job, len(first[0]), 5, 1)
    sources = [round.encode(each.numpy(), 1, None) for each in first]
    with pytest.raises(ProtocolError):
        run_in_memory(sources, round.parameters, dict.fromkeys((0, 1), ServerPhase.MASKED))
    again = [round.encode(each.numpy(), 1, None) for each in released(job, tmp_path, 5, attempt=2)]
    for before, now in zip(sources, again, strict=True):
        assert np.array_equal(before.block(0, round.length), now.block(0, round.length))
    found = run_in_memory(again, round.parameters, {2: ServerPhase.UNMASK})
    assert found.survivors == (0, 1, 2, 3, 4)
    assert np.array_equal(found.total, plain_sum(sources, round.parameters).total)
    masked = opened(job, round, found.total, 5)

    places = job.algorithm.survey.sum_places  # type: ignore[attr-defined]
    in_the_clear = places.decode(sum(first)[-places.size :] / 5, 5)
    each = [places.decode(vector[-places.size :], 1) for vector in first]
    for name, sums in masked.items():
        assert np.array_equal(sums, in_the_clear[name])
        exact = [sum(map(Fraction, values)) for values in zip(*(own[name].flat for own in each), strict=True)]
        assert sums.ravel().tolist() == pytest.approx([float(value) for value in exact], abs=1e-12)
    for silo in range(5):
        account = SiloAccount.from_json((tmp_path / str(silo) / "privacy" / "example.json").read_text())
        assert len(account.entries) == 1, "asked twice, and paid once"


def test_the_noise_is_in_what_each_silo_masks(tmp_path: Path) -> None:
    """The guarantee is each silo's own: its vector before masks has all of the noise, as without masks."""
    job = masked_job(tmp_path)
    places = job.algorithm.survey.sum_places  # type: ignore[attr-defined]
    table = tmp_path / "alder.csv"
    draws = []
    for number in range(12):
        delta = answered(job, tmp_path / str(number), 1, table).delta
        sums = places.decode(delta[1:], 1)
        names = job.algorithm.survey.released(0)  # type: ignore[attr-defined]
        draws.append(np.concatenate([sums[name].ravel() for name in names]))
    spread = np.std(draws, axis=0, ddof=1)
    noise = job.privacy.noise_multiplier  # type: ignore[union-attr]
    values = spread.size * 11
    # Of χ² with so many degrees of freedom, five standard deviations.
    assert float((spread**2).mean()) == pytest.approx(noise**2, rel=5 * (2 / values) ** 0.5)


def test_masked_and_in_the_clear_a_rehearsal_answers_alike(tmp_path: Path) -> None:
    """The same seeded noise: all answers, those of trees in three rounds among them."""
    survey = write(tmp_path)
    clear, masked = (
        analyse(survey, overrides={"secure_aggregation": each, "privacy.epsilon": 4.0})
        for each in (False, True)
    )
    assert masked.answers == clear.answers
    assert (clear.masked, masked.masked) == (False, True)
    assert masked.privacy == clear.privacy
    assert not masked.answers[2].why


def test_a_lying_silo_is_caught_where_no_silos_digits_have_such_a_sum(tmp_path: Path) -> None:
    """Masks hide who lies: what no three silos can send is found in the total; what one could is not."""
    job = masked_job(tmp_path)
    vectors = released(job, tmp_path)
    columns = len(vectors[0])
    round = SecureRound.of(job, columns, 3, 1)
    honest = [round.encode(each.numpy(), 1, None) for each in vectors]
    elements = [each.block(0, round.length).astype(np.uint32) for each in honest]

    def read(lie: np.ndarray) -> dict[str, Doubles]:
        given: list[VectorSource] = [*honest[:2], ArraySource(lie)]
        return opened(job, round, plain_sum(given, round.parameters).total)

    whole = elements[2].copy()
    whole[:columns] += np.uint32(1 << 20)
    negative = elements[2].copy()
    negative[1:2] -= np.uint32(1 << 20)
    heavier = elements[2].copy()
    heavier[columns] += np.uint32(7)
    noise = np.random.default_rng(1).integers(0, 1 << 32, round.length, dtype=np.uint32)
    for lie in (whole, negative, heavier, noise):
        with pytest.raises(AggregationError, match="silo"):
            read(lie)
    with pytest.raises(InvalidUpdate):
        round.encode(np.full(columns, 1e6, np.float32), 1, None)
    # Within the range of digits a lie is a number like any other, and moves the total by no more than 2^35.
    name = job.algorithm.survey.released(0)[0]  # type: ignore[attr-defined]
    places = job.algorithm.survey.sum_places  # type: ignore[attr-defined]
    first = places.decode(vectors[2][1:], 1)
    first[name] = np.full_like(first[name], 1e9)
    forged = np.concatenate([np.zeros(1, np.float32), places.encode(first).numpy()])
    sums = read(round.encode(forged, 1, None).block(0, round.length).astype(np.uint32))
    assert (np.abs(sums[name]) > 0.9e9).all()


def test_what_goes_with_masked_noise_and_what_does_not(tmp_path: Path) -> None:
    job = masked_job(tmp_path)
    assert asked_columns(AnalysesTable(), job) is None, "noise bounds what the difference of two sums tells"
    insisting = PolicyTable(secure_aggregation=True)
    assert list(privacy_objections(insisting, job)) == []
    seen = survey_job(load_survey(write(tmp_path)), 3)
    assert "takes part only with secure aggregation" in next(privacy_objections(insisting, seen))
    masked_job(tmp_path)
    assert "--plan" not in (plan := survey_plan(load_survey(tmp_path / "survey.toml"))).trust
    assert plan.to_dict()["secure_aggregation"] is True
    assert "does not rest on the masks" in plan.trust
    relayed = job.model_copy(update={"regions": job.regions.model_copy(update={"sum": True})})
    with pytest.raises(ConfigError, match=r"regions\.sum"):
        make_plan(relayed, 3)
    with pytest.raises(ConfigError, match="at least 3 silos"):
        survey_job(load_survey(tmp_path / "survey.toml"), 2)
    training = parse_job(
        'task = "t"\n[privacy]\nlevel = "example"\nsecure_aggregation = true\nnoise_multiplier = 1.0\n'
        "delta = 1e-6\nclip_norm = 1.0\n[evaluation]\nevery = 0\n[aggregation]\nweighting = 'uniform'"
    )
    with pytest.raises(PrivacyError, match="no bounded norm"):
        make_plan(training, 3)
    with pytest.raises(PrivacyError, match="no bounded norm"):
        SecureRound.of(training, 10, 3, 1)
    with pytest.raises(ConfigError, match="corruption belongs to secure aggregation"):
        simulate(job, overrides={"privacy.secure_aggregation": False, "privacy.corruption": 0.1})
