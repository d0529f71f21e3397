"""Partitions: exact covers, seeded, with clear refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundtable.core.errors import ConfigError
from roundtable.core.task import Site
from roundtable.simulation import describe_partition
from roundtable.simulation.world.partition import PARTITIONERS, make_partition

SPECS = [
    {"name": "iid"},
    {"name": "dirichlet", "alpha": 0.3, "min_size": 0},
    {"name": "shards", "shards": 2},
    {"name": "quantity", "distribution": "lognormal", "sigma": 1.5},
    {"name": "quantity", "distribution": "power", "exponent": 1.2},
    {"name": "natural", "min_size": 0},
]


@settings(max_examples=60, deadline=None)
@given(
    spec=st.sampled_from(SPECS),
    rows=st.integers(40, 400),
    kinds=st.integers(1, 12),
    count=st.integers(1, 15),
    seed=st.integers(0, 2**40),
)
def test_every_row_belongs_to_exactly_one_client(spec, rows, kinds, count, seed):
    labels = np.random.default_rng(seed).integers(0, kinds, rows)
    partition = make_partition(spec, seed)
    shares = [partition(labels, index, count) for index in range(count)]
    assert np.array_equal(np.sort(np.concatenate(shares)), np.arange(rows))
    assert all(len(share) >= spec.get("min_size", 1) for share in shares)
    again = make_partition(spec, seed)
    assert all(np.array_equal(again(labels.copy(), index, count), shares[index]) for index in range(count))


@pytest.mark.parametrize("spec", SPECS[:5])
def test_another_seed_gives_another_split(spec):
    labels = np.arange(500) % 10
    one, two = make_partition(spec, 1), make_partition(spec, 2)
    assert not np.array_equal(one(labels, 0, 5), two(labels, 0, 5))


def test_iid_sizes_differ_by_at_most_one():
    sizes = make_partition({"name": "iid"}, 0).assignment(np.zeros(103), 10).sizes
    assert sizes.max() - sizes.min() == 1


def test_shards_give_few_labels_to_each_client():
    labels = np.arange(6000) % 10
    partition = make_partition({"name": "shards", "shards": 2}, 3)
    kinds = [len(np.unique(labels[partition(labels, index, 100)])) for index in range(100)]
    assert max(kinds) <= 2
    assert partition.assignment(labels, 100).sizes.tolist() == [60] * 100


def test_dirichlet_is_uneven_for_small_alpha_and_even_for_large():
    labels = np.arange(20000) % 10

    def spread(alpha):
        partition = make_partition({"name": "dirichlet", "alpha": alpha, "min_size": 0}, 5)
        counts = np.stack([np.bincount(labels[partition(labels, i, 10)], minlength=10) for i in range(10)])
        return counts.std()

    # A share of Dir(a) over n has variance (1/n)(1 − 1/n)/(n a + 1): sd 424 rows of 2000 at a = 0.1.
    assert 300 < spread(0.1) < 600
    assert spread(1000.0) < 15


def test_train_and_test_sets_share_their_mixture():
    partition = make_partition({"name": "dirichlet", "alpha": 0.2, "min_size": 0}, 5)
    train, test = np.arange(50000) % 10, np.arange(10000) % 10
    for index in range(5):
        one = np.bincount(train[partition(train, index, 5)], minlength=10) / 5000
        two = np.bincount(test[partition(test, index, 5)], minlength=10) / 1000
        assert np.abs(one - two).max() < 0.002


def test_natural_keeps_each_key_whole():
    writers = np.array(["eva", "bo", "ann", "bo", "eva", "ann", "cy"])
    partition = make_partition({"name": "natural"}, 0)
    assert [partition(writers, index, 4).tolist() for index in range(4)] == [[2, 5], [1, 3], [6], [0, 4]]
    owners = {
        key: {index for index in range(2) if key in writers[partition(writers, index, 2)]} for key in writers
    }
    assert all(len(clients) == 1 for clients in owners.values())


def test_an_empty_client_is_refused_with_the_remedy():
    labels = np.zeros(5, dtype=np.int64)
    with pytest.raises(ConfigError, match=r"iid leaves 3 of 8 clients .* have fewer clients.*min_size = 0"):
        make_partition({"name": "iid"}, 0)(labels, 0, 8)
    with pytest.raises(ConfigError, match=r"dirichlet leaves .*raise alpha"):
        make_partition({"name": "dirichlet", "alpha": 0.001}, 0)(np.arange(100) % 2, 0, 50)
    with pytest.raises(ConfigError, match="as many clients as there are keys"):
        make_partition({"name": "natural"}, 0)(np.array([1, 1, 2]), 0, 3)
    assert len(make_partition({"name": "iid", "min_size": 0}, 0)(labels, 7, 8)) == 0


def test_mistakes_in_the_table_are_named():
    with pytest.raises(ConfigError, match=r"unknown partition 'dirichle'; .*did you mean 'dirichlet'"):
        make_partition({"name": "dirichle"}, 0)
    with pytest.raises(ConfigError, match=r"alpah: unknown key; did you mean 'alpha'"):
        make_partition({"name": "dirichlet", "alpah": 1.0}, 0)
    with pytest.raises(ConfigError, match=r"alpha: .*greater than 0"):
        make_partition({"name": "dirichlet", "alpha": -1.0}, 0)
    with pytest.raises(ConfigError, match="one label a row"):
        make_partition({"name": "iid"}, 0)(np.zeros((4, 2)), 0, 2)


def test_labels_loaded_anew_are_recognised(monkeypatch):
    calls = []
    original = PARTITIONERS["iid"].assign
    monkeypatch.setattr(PARTITIONERS["iid"], "assign", lambda self, *a: calls.append(1) or original(self, *a))
    partition = make_partition({"name": "iid"}, 0)
    for index in range(10):
        Site("c", index, 10, {}, partition).shard(torch.arange(100) % 7)
    assert len(calls) == 1
    Site("c", 0, 10, {}, partition).shard(torch.arange(100) % 6)
    assert len(calls) == 2


def test_a_million_clients_are_assigned_at_once():
    labels = np.arange(2_000_000) % 10
    assignment = make_partition({"name": "iid"}, 0).assignment(labels, 1_000_000)
    assert assignment.sizes.tolist() == [2] * 1_000_000


def test_the_report_says_who_has_what(tmp_path):
    labels = np.arange(1000) % 4
    report = describe_partition({"name": "shards", "shards": 1}, labels, 4, seed=2)
    assert report.sizes.tolist() == [250] * 4
    assert sorted(report.counts.argmax(axis=1).tolist()) == [0, 1, 2, 3]
    assert report.heterogeneity == pytest.approx(0.75)
    assert describe_partition({"name": "iid"}, labels, 4).heterogeneity < 0.1
    assert "rows a client: 250 to 250" in str(report)
    report.plot(tmp_path / "who.png")
    assert (tmp_path / "who.png").read_bytes().startswith(b"\x89PNG")


def test_the_report_is_of_the_split_that_clients_get():
    labels = np.arange(300) % 3
    spec = {"name": "dirichlet", "alpha": 0.5}
    report, partition = describe_partition(spec, labels, 5, seed=9), make_partition(spec, 9)
    for index in range(5):
        own = np.bincount(labels[partition(labels, index, 5)], minlength=3)
        assert own.tolist() == report.counts[index].tolist()
