"""A job's privacy table is refused before the first round where it cannot be kept."""

from __future__ import annotations

import pytest

from roundtable.core import parse_job
from roundtable.core.errors import ConfigError
from roundtable.core.privacy_table import ClientLevel, Masking, NoPrivacy, masking_of, privacy_from

GOOD = {"level": "client", "epsilon": 4.0, "delta": 1e-5, "clip_norm": 1.0, "population": 1000}
LEVELS = ("client", "client_local", "example", "distributed", "dp_ftrl")


def test_a_good_table_is_taken() -> None:
    privacy = privacy_from(GOOD)
    assert isinstance(privacy, ClientLevel)
    assert (privacy.unit, privacy.accountant, privacy.epsilon) == ("client", "pld", 4.0)


def test_no_table_is_no_privacy() -> None:
    assert parse_job('task = "t"').privacy == NoPrivacy()


@pytest.mark.parametrize("key", ["epsilon", "delta", "noise_multiplier", "clip_norm", "secure_aggregation"])
def test_keys_without_a_level_are_refused(key: str) -> None:
    """Whoever writes a budget believes that it is kept; without a level nothing would be."""
    with pytest.raises(ConfigError, match=r"job:2: privacy\.level: missing; choose one of none, client"):
        parse_job(f'task = "t"\n[privacy]\n{key} = 1')


@pytest.mark.parametrize(
    ("level", "key", "owners"),
    [
        ("none", "epsilon", "'client' or 'client_local' or 'example' or 'distributed' or 'dp_ftrl'"),
        ("client", "batch_size", "'example'"),
        ("client", "secure_aggregation", "'none' or 'example'"),
        ("client_local", "clipping", "'client'"),
        ("example", "bands", "'dp_ftrl'"),
        ("distributed", "separation", "'dp_ftrl'"),
        ("dp_ftrl", "group_size", "'none' or 'distributed'"),
    ],
)
def test_keys_of_another_level_say_which(level: str, key: str, owners: str) -> None:
    text = f'task = "t"\n[privacy]\nlevel = "{level}"\n{key} = 1'
    with pytest.raises(ConfigError) as caught:
        parse_job(text)
    expected = f"job:4: privacy.{key}: belongs to level = {owners}, and this table has level = '{level}'"
    assert expected in str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": 0.0}, r"privacy\.epsilon: .*greater than 0 \(got 0\.0\)"),
        ({"epsilon": float("nan")}, r"privacy\.epsilon: .*finite number"),
        ({"delta": 1e-3}, "not below 1 / 1000"),
        ({"delta": 0.0}, r"privacy\.delta: 0: it must be above 0"),
        ({"delta": float("nan")}, r"privacy\.delta: nan: it must be above 0"),
        ({"delta": 1e-300}, r"privacy\.delta: 1e-300: below 1e-13"),
        ({"delta": None}, r"privacy\.delta"),
        ({"noise_multiplier": 1e30}, r"noise_multiplier: 1e\+30.*at most 1e\+06"),
        ({"noise_multiplier": 0.0}, r"privacy\.noise_multiplier: .*greater than 0"),
        ({"epsilon": None}, "epsilon and noise_multiplier are both missing"),
        ({"clip_norm": 0.0}, r"privacy\.clip_norm: .*greater than 0"),
        ({"clip_norm": float("inf")}, "clip_norm"),
        ({"level": "cleint"}, r"privacy\.level: choose one of none, client, .*did you mean 'client'\?"),
        ({"accountant": "gdp"}, "'pld', 'rdp' or 'prv'"),
        ({"epsilom": 2.0}, r"privacy\.epsilom: unknown key; did you mean 'epsilon'\?"),
        ({"epsilon": "4"}, "valid number"),
        ({"quantile": 1.0}, "quantile"),
        ({"quantile": 0.4}, 'quantile and clip_learning_rate belong to clipping = "adaptive"'),
        ({"population": 0}, "population"),
        ({"level": "none", "secure_aggregation": True}, "delta: belongs to level"),
    ],
)
def test_bad_values_are_refused_with_their_name(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        privacy_from({**GOOD, **change})


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("key", ["clip_norm", "delta"])
def test_each_level_needs_a_bound_and_a_delta(level: str, key: str) -> None:
    table = {"level": level, "epsilon": 1.0, "delta": 1e-5, "clip_norm": 1.0}
    assert privacy_from(table).level == level
    del table[key]
    with pytest.raises(ConfigError, match=rf"privacy\.{key}: missing"):
        privacy_from(table)


def test_masking_is_asked_for_at_levels_none_and_example_and_part_of_distributed() -> None:
    plain = privacy_from({"level": "none", "secure_aggregation": True, "clip_norm": 2.0, "group_size": 3})
    assert masking_of(plain) == Masking(2.0, 3, None, 0.3, 32)
    noisy = privacy_from({**GOOD, "level": "distributed", "corruption": 0.1})
    assert masking_of(noisy) == Masking(1.0, None, 0.1, 0.3, 24)
    sums = privacy_from({**GOOD, "level": "example", "secure_aggregation": True, "dropout_tolerance": 0.1})
    assert masking_of(sums) == Masking(None, None, None, 0.1, 32)
    assert masking_of(privacy_from(GOOD)) is None
    assert masking_of(NoPrivacy()) is None


@pytest.mark.parametrize("key", ["group_size", "corruption", "clip_norm", "dropout_tolerance"])
def test_what_only_masking_uses_is_refused_without_it(key: str) -> None:
    value = 3 if key == "group_size" else 0.5
    with pytest.raises(ConfigError, match=f"{key} belongs to secure aggregation"):
        privacy_from({"level": "none", key: value})
