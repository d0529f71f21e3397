"""Attacks do what their papers say, and the tuned ones find the weak spot of a defence."""

from __future__ import annotations

import pytest
import torch

from roundtable.aggregation import AggregationConfig, ClientRow, TensorMatrix, aggregate, attacks
from roundtable.core.errors import ConfigError


@pytest.fixture
def honest() -> torch.Tensor:
    return torch.randn(16, 200, generator=torch.Generator().manual_seed(3)) + 0.5


def test_directions(honest: torch.Tensor) -> None:
    mean = honest.mean(dim=0)
    torch.testing.assert_close(attacks.sign_flip(honest, 4, 10.0), (-10 * mean).expand(4, -1))
    torch.testing.assert_close(attacks.inner_product_manipulation(honest, 2, 0.5)[1], -0.5 * mean)
    z = attacks.alie_z_max(20, 4)
    torch.testing.assert_close(attacks.a_little_is_enough(honest, 4)[0], mean - z * honest.std(dim=0))
    assert torch.equal(attacks.mimic(honest, 3, 5), honest[5].expand(3, -1))
    assert torch.isinf(attacks.infinities(honest, 4)).all()
    assert torch.isnan(attacks.not_a_number(honest, 4)).all()
    assert attacks.flip_labels(torch.tensor([0, 3, 9]), 10).tolist() == [9, 6, 0]
    noise = attacks.gaussian(honest, 4, 2.0, seed=1)
    assert torch.equal(noise, attacks.gaussian(honest, 4, 2.0, seed=1))
    assert float(noise.std()) == pytest.approx(2.0, rel=0.1)


def test_hostile_rows_are_copies_that_can_be_changed(honest: torch.Tensor) -> None:
    for rows in (attacks.mimic(honest, 4), attacks.sign_flip(honest, 4)):
        rows[0] = 0
        assert rows[1].any()
        assert honest[0].any()


@pytest.mark.parametrize("kind", ["alie", "ipm"])
def test_a_tuned_attack_does_at_least_the_damage_of_each_fixed_one(honest: torch.Tensor, kind: str) -> None:
    clients = [ClientRow(f"silo-{index:02}") for index in range(20)]
    settings = AggregationConfig("multi_krum", {"f": 4})

    def defence(rows: torch.Tensor) -> torch.Tensor:
        return aggregate(TensorMatrix(rows), clients, settings).vector

    def damage(rows: torch.Tensor) -> float:
        return float((defence(torch.cat([honest, rows])) - honest.mean(dim=0)).norm())

    tuned = damage(attacks.tuned(honest, 4, defence, kind))  # type: ignore[arg-type]
    attack = attacks.a_little_is_enough if kind == "alie" else attacks.inner_product_manipulation
    assert all(tuned >= damage(attack(honest, 4, factor)) for factor in (0.25, 0.5, 1.0, 2.0))
    assert tuned > damage(honest[:4])


def test_what_cannot_be_attacked(honest: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match="f = 5 of n = 8"):
        attacks.a_little_is_enough(honest[:3], 5)
    with pytest.raises(ConfigError, match="one of alie, ipm"):
        attacks.tuned(honest, 4, lambda rows: rows[0], "lie")  # type: ignore[arg-type]
