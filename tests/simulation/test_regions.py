"""Regions that add up: the flat sum within rounding, hierarchical FedAvg against a loop written by hand."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundtable.aggregation import AggregationConfig, TensorMatrix
from roundtable.core.errors import AggregationError, ConfigError, PrivacyError
from roundtable.engine import Rows, sum_by_region
from roundtable.engine.combining.region_sums import mean_of_parts, parts_of
from roundtable.engine.messages import BlobReference, RowReference, Update
from roundtable.simulation.backend import Work
from roundtable.simulation.backends.sequential import Sequential
from roundtable.simulation.simulate import make_world

HERE = Path(__file__).parent
OFF = {"validation": {"norm_ratio": "off", "weight_ratio": "off"}}
UNEQUAL = {"members": {"north": 5, "south": 1, "east": 2}}


def regional(rounds=1, **table):
    return {
        "simulation__regions": table,
        "regions": {"sum": rounds > 1, "rounds": rounds},
        "aggregation": OFF,
    }


@pytest.mark.parametrize("backend", ["sequential", "processes"])
def test_the_sum_of_regions_is_the_flat_one_within_rounding(run, backend):
    settings = {"simulation__backend": backend, "cohort__size": 6, "simulation__workers": 2}
    server = {"server_optimizer": {"name": "fedavgm"}}
    flat = run(aggregation={**OFF, **server}, **settings)
    tree = run(simulation__regions=UNEQUAL, aggregation={**OFF, **server}, **settings)
    torch.testing.assert_close(tree.model.vector, flat.model.vector, rtol=1e-5, atol=1e-6)
    for one, other in zip(tree.history.records, flat.history.records, strict=True):
        assert one.contributors == other.contributors
        assert one.weights == pytest.approx(other.weights)


def by_hand(job, sizes, every, weigh):
    """Hierarchical FedAvg with all clients, in float64, and what is measured after each round."""
    world = make_world(job, None, HERE)
    backend = Sequential(world)
    start = world.initial.vector
    held = [start] * len(sizes)
    means = []
    for round in range(1, job.rounds + 1):
        weights, number = [], 0
        for region, size in enumerate(sizes):
            total, weight = torch.zeros(start.numel(), dtype=torch.float64), 0
            for index in range(number, number + size):
                row = backend.rows(1)[0]
                (answer,) = backend.train(round, held[region], [Work(world.names[index], index)], [row])
                total += weigh(answer) * row.double()
                weight += weigh(answer)
            number += size
            held[region] = (held[region].double() + total / weight).float()
            weights.append(weight)
        mean = sum(w * v.double() for w, v in zip(weights, held, strict=True)) / sum(weights)
        means.append(mean.float())
        if round % every == 0:
            held = [means[-1]] * len(sizes)
    return means


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_rounds_within_regions_are_hierarchical_fedavg(run, make_job, tmp_path, weighting):
    """Rounds 2 and 4 go up; a run that was interrupted between them goes on with the regions' models."""
    settings = {
        "simulation__regions": UNEQUAL,
        "regions": {"sum": True, "rounds": 2},
        "aggregation": {**OFF, "weighting": weighting},
        "cohort__size": 8,
        "rounds": 5,
        "keep__every": 1,
    }

    def weigh(answer):
        return answer.examples if weighting == "examples" else 1

    means = by_hand(make_job(**settings), (5, 1, 2), 2, weigh)
    whole = run(**settings)
    for made, mean in enumerate(means, start=1):
        torch.testing.assert_close(whole.models[made].vector, mean, rtol=1e-4, atol=1e-5)
    flat = run(**{**settings, "simulation__regions": {}, "regions": {}})
    assert not torch.allclose(whole.model.vector, flat.model.vector, rtol=1e-3, atol=1e-4)
    run(**{**settings, "rounds": 3}, _run_dir=tmp_path / "run")
    resumed = run(**settings, _run_dir=tmp_path / "run", _resume=True)
    assert torch.equal(resumed.model.vector, whole.model.vector)


def test_between_rounds_that_go_up_a_cohort_stays_and_nothing_is_stopped(run, monkeypatch):
    """As at a coordinator, which knows of no others: it draws by the number of the round that goes up."""
    settings = {
        "simulation__regions": {"count": 2},
        "regions": {"sum": True, "rounds": 2},
        "aggregation": OFF,
        "cohort__size": 3,
        "rounds": 5,
    }
    cohorts = [record.cohort for record in run(**settings).history.records]
    assert cohorts[0] == cohorts[1] != cohorts[2] == cohorts[3] != cohorts[4]
    alone = {"simulation__regions": {}, "regions": {}, "cohort__size": 3, "rounds": 5}
    drawn = [record.cohort for record in run(**{**settings, **alone}).history.records]
    assert [cohorts[1], cohorts[3], cohorts[4]] == [drawn[1], drawn[3], drawn[4]]
    found = run(**settings, stop={"metric": "loss", "patience": 1, "minimum_improvement": 100.0})
    assert (len(found.history), found.best.round) == (4, 4)
    with pytest.raises(ConfigError, match="gives up all since the last one that went up"):
        run(**settings, cohort__on_failure="skip")


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_region_that_is_away_keeps_its_model_and_what_it_counts(data):
    """Several rounds with whoever answers, against float64 arithmetic that knows nothing of offsets."""
    every, chance = data.draw(st.integers(1, 4)), np.random.default_rng(data.draw(st.integers(0, 99)))
    region_of = {f"c{n}": data.draw(st.sampled_from("nse")) for n in range(6)}
    model, held, naive, config = torch.zeros(7), {}, {}, AggregationConfig()
    began = model
    for round in range(1, 6):
        answered = sorted(data.draw(st.sets(st.sampled_from(sorted(region_of)), min_size=1)))
        broken = set(answered[1:]) & data.draw(st.sets(st.sampled_from(sorted(region_of))))
        vectors = chance.normal(size=(len(answered), 7)).astype(np.float32)
        counts = [int(n) for n in chance.integers(1, 50, len(answered))]
        for place, name in enumerate(answered):
            vectors[place, 3] = np.nan if name in broken else vectors[place, 3]
        members = defaultdict(list, {region: [] for region in "nse"})
        sums = {}
        for name, vector, count in zip(answered, vectors.astype(np.float64), counts, strict=True):
            members[region_of[name]].append(name)
            if name not in broken:
                total, weight = sums.get(region_of[name], (0.0, 0))
                sums[region_of[name]] = (total + count * vector, weight + count)
        for region, (total, weight) in sums.items():
            before = naive.get(region, (began.double().numpy(), 0))[0]
            naive[region] = (before + total / weight, weight)
        expected = sum(w * v for v, w in naive.values()) / sum(w for _, w in naive.values())
        updates = [
            Update(n, RowReference(i), c) for i, (n, c) in enumerate(zip(answered, counts, strict=True))
        ]
        mean = sum_by_region(
            config,
            Rows(TensorMatrix(torch.from_numpy(vectors)), updates),
            members,
            model,
            held,
            goes_up=round % every == 0,
        )
        assert set(mean.excluded) == broken
        assert set(mean.weights) == set(answered) - broken
        torch.testing.assert_close((model + mean.vector).double().numpy(), expected, rtol=1e-4, atol=1e-4)
        model, held = model + mean.vector, mean.regions
        if round % every == 0:
            assert not held
            began, naive = model, {}


def test_what_relays_send_is_combined_as_regions_are():
    """Two relays' means and a silo's own update: the bits of three regions, and the flat mean of all five."""
    chance, config = np.random.default_rng(5), AggregationConfig()
    vectors = torch.from_numpy(chance.normal(size=(5, 9)).astype(np.float32))
    members = {"a-silo": ["a-silo"], "east": ["b", "d"], "west": ["c", "e"]}
    names = ["a-silo", "b", "c", "d", "e"]
    rows = Rows(TensorMatrix(vectors), [Update(n, RowReference(i), 3 + 7 * i) for i, n in enumerate(names)])
    regions = sum_by_region(config, rows, members, torch.zeros(9), {}, goes_up=True)
    relay_of = {"b": "east", "d": "east", "c": "west", "e": "west"}
    sent = [replace(u, vector=BlobReference(relay_of.get(u.client, "own")), relay=relay_of.get(u.client, ""))
            for u in rows.updates]  # fmt: skip
    parts = parts_of(sent[::-1])
    assert [[update.client for update in part] for part in parts] == [["a-silo"], ["b", "d"], ["c", "e"]]
    means = [
        sum_by_region(config, Rows(rows.matrix.select(places), [rows.updates[i] for i in places]),
                      {"r": [names[i] for i in places]}, torch.zeros(9), {}, goes_up=True).vector
        for places in ([0], [1, 3], [2, 4])
    ]  # fmt: skip
    mean = mean_of_parts(config, TensorMatrix(torch.stack(means)), parts)
    assert torch.equal(mean.vector, regions.vector)
    assert mean.weights == pytest.approx(regions.weights)
    counts = torch.tensor([float(update.examples) for update in rows.updates], dtype=torch.float64)
    flat = (counts @ vectors.double() / counts.sum()).float()
    torch.testing.assert_close(mean.vector, flat, rtol=1e-5, atol=1e-6)


def test_an_algorithm_beside_the_job_goes_with_regions(run):
    own = {"algorithm__name": "own_algorithms.py:Held", "algorithm__strength": 0.3}
    flat, tree = run(**own, aggregation=OFF), run(**own, **regional(count=2))
    torch.testing.assert_close(tree.model.vector, flat.model.vector, rtol=1e-5, atol=1e-6)


def test_a_region_without_a_usable_update_is_said(run):
    rows = Rows(TensorMatrix(torch.full((1, 3), torch.inf)), [Update("a", RowReference(0), 4)])
    with pytest.raises(AggregationError, match=r"no region has a usable update.* a: the update holds values"):
        sum_by_region(AggregationConfig(), rows, {"n": ["a"]}, torch.zeros(3), {}, goes_up=True)
    heard = []
    run(**regional(count=3, rounds=2), rounds=1, _progress=heard.append)
    said = [event.note.message for event in heard if event.note is not None and event.note.kind == "regions"]
    assert len(said) == 1
    assert "in 3 regions: region-1 (3), region-2 (3), region-3 (2); each adds" in said[0]


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"simulation__regions": {"members": {"north": 3}}}, ConfigError, "add up to 3 clients, and .* = 8"),
        ({"simulation__regions": {"count": 9}}, ConfigError, "count = 9 is above simulation.clients = 8"),
        ({"simulation__regions": {"members": {}}}, ConfigError, "either count or members"),
        ({"regions": {"rounds": 2}}, ConfigError, "rounds above 1 need sum = true"),
        ({"simulation__regions": {"members": {"../a": 8}}}, ConfigError, "members"),
        ({"aggregation": {}}, ConfigError, "norm_ratio = .* compares each update with the median"),
        ({"aggregation": {**OFF, "rule": "median"}}, ConfigError, "'median' looks at single updates"),
        ({"aggregation": {**OFF, "pre": [{"name": "nnm", "f": 1}]}}, ConfigError, "aggregation.pre looks"),
        ({"aggregation": {**OFF, "weighting": "inverse_loss"}}, ConfigError, "not of the examples alone"),
        ({"aggregation": {**OFF, "diagnosis": True}}, ConfigError, "diagnosis compares single updates"),
        ({"round": {"mode": "buffered", "buffer": 2}, "cohort": {}}, ConfigError, "takes updates one by one"),
        ({"simulation__attack": {"name": "alie", "count": 1}}, ConfigError, "replaces single updates"),
        (
            {
                "privacy": {
                    "level": "none",
                    "secure_aggregation": True,
                    "clip_norm": 1.0,
                    "public_evaluation": True,
                },
                "regions": {},
            },
            PrivacyError,
            "masks change no bit",
        ),
        (
            {
                "privacy": {
                    "level": "none",
                    "secure_aggregation": True,
                    "clip_norm": 1.0,
                    "public_evaluation": True,
                }
            },
            PrivacyError,
            "a masked sum is opened by the coordinator alone",
        ),
        (
            {"algorithm__name": "scaffold", "aggregation": {**OFF, "weighting": "uniform"}},
            ConfigError,
            "'scaffold' keeps something beside",
        ),
        (
            {"aggregation": {**OFF, "server_optimizer": {"name": "fedadam"}}},
            ConfigError,
            "a step from one global model",
        ),
        ({"transfer": {"down": "bfloat16"}}, ConfigError, "the change of one global model"),
        (
            {"regions": {"sum": True}, "simulation__regions": {}},
            ConfigError,
            "is told by .simulation.regions",
        ),
        (
            {"regions": {"sum": True}, "transfer": {"up": "int8"}},
            ConfigError,
            "transfer.up = 'int8' is more than",
        ),
        (
            {
                "regions": {"sum": True},
                "privacy": {
                    "level": "none",
                    "secure_aggregation": True,
                    "clip_norm": 1.0,
                    "group_size": 3,
                    "public_evaluation": True,
                },
            },
            PrivacyError,
            "privacy.group_size wants one of each group",
        ),
    ],
)
def test_what_sums_by_region_cannot_do_is_refused_before_round_1(run, settings, error, says):
    with pytest.raises(error, match=says):
        run(**{**regional(count=2, rounds=2), **settings})
