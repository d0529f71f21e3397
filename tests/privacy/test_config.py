"""A job's privacy table is refused before the first round where it cannot be kept."""

from __future__ import annotations

import pytest

from roundtable.core.errors import PrivacyError
from roundtable.privacy import PrivacyConfig

GOOD = {"level": "client", "epsilon": 4.0, "delta": 1e-5, "clip_norm": 1.0, "population": 1000}


def test_a_good_table_is_taken() -> None:
    config = PrivacyConfig.from_table(GOOD)
    assert config.private
    assert config.unit == "client"
    assert config.accountant == "pld"


def test_no_table_is_no_privacy() -> None:
    assert not PrivacyConfig.from_table({}).private


@pytest.mark.parametrize("key", ["epsilon", "delta", "noise_multiplier"])
def test_asking_for_privacy_without_a_level_is_refused(key: str) -> None:
    """Whoever writes a budget believes that it is kept; without a level nothing would be."""
    with pytest.raises(PrivacyError, match=rf"privacy\.{key} without privacy\.level would protect nobody"):
        PrivacyConfig.from_table({key: 1e-5, "clip_norm": 1.0})
    assert not PrivacyConfig.from_table({key: 1e-5, "level": "none"}).private


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": 0.0}, r"privacy\.epsilon is 0\.0"),
        ({"epsilon": -1.0}, r"privacy\.epsilon is -1\.0"),
        ({"epsilon": float("nan")}, r"privacy\.epsilon is nan"),
        ({"delta": 1e-3}, "not below 1 / 1000"),
        ({"delta": 0.0}, r"privacy\.delta is 0\.0"),
        ({"delta": 1e-300}, r"privacy\.delta is 1e-300: below 1e-13"),
        ({"noise_multiplier": 1e30}, r"noise_multiplier is 1e\+30.*at most 1e\+06"),
        ({"delta": None}, r"delta"),
        ({"noise_multiplier": 0.0}, r"privacy\.noise_multiplier is 0\.0"),
        ({"clip_norm": 0.0}, r"privacy\.clip_norm is 0\.0"),
        ({"clip_norm": float("inf")}, "clip_norm"),
        ({"level": "central"}, "choose one of none, client"),
        ({"accountant": "gdp"}, "choose one of pld, rdp, prv"),
        ({"epsilom": 2.0}, r"privacy\.epsilom is not a setting"),
        ({"epsilon": "4"}, "type float"),
        ({"secure_aggregation": 1}, "type bool"),
        ({"secure_aggregation": True}, "secure aggregation hides"),
        ({"quantile": 1.0}, "quantile"),
        ({"bits": 40}, r"privacy\.bits"),
        ({"bits": True}, "type int"),
        ({"population": 0}, "population"),
        ({"dropout_tolerance": 1.0}, "dropout_tolerance"),
    ],
)
def test_bad_values_are_refused_with_their_name(change: dict[str, object], message: str) -> None:
    with pytest.raises(PrivacyError, match=message):
        PrivacyConfig.from_table({**GOOD, **change})


def test_each_level_needs_a_bound_and_noise_or_a_budget() -> None:
    with pytest.raises(PrivacyError, match="clip_norm is missing"):
        PrivacyConfig(level="client", epsilon=1.0, delta=1e-5)
    with pytest.raises(PrivacyError, match="both missing"):
        PrivacyConfig(level="client", clip_norm=1.0, delta=1e-5)
    with pytest.raises(PrivacyError, match="delta is missing"):
        PrivacyConfig(level="client", clip_norm=1.0, epsilon=1.0)


def test_distributed_noise_without_secure_aggregation_is_refused() -> None:
    with pytest.raises(PrivacyError, match="protects nobody"):
        PrivacyConfig(level="distributed", epsilon=4.0, delta=1e-5, clip_norm=1.0)


def test_clipping_that_needs_the_norms_is_refused_where_nobody_sees_them() -> None:
    with pytest.raises(PrivacyError, match="needs level 'client'"):
        PrivacyConfig(level="client_local", epsilon=4.0, delta=1e-5, clip_norm=1.0, clipping="adaptive")
