"""Rounds within regions, in processes of their own, against the simulation of the same job: bit for bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Federation

from roundtable.core.models import open_model
from roundtable.simulation import simulate

TASK = """
import torch
from torch import nn
from torch.nn import functional as F
from roundtable.core import Task

class Toy(Task):
    def model(self):
        return nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Tanh(), nn.Linear(30, 3))
    def data(self, site):
        number = int(site.name[-1])
        g = torch.Generator().manual_seed(number)
        x = torch.randn(24 + 8 * number, 20, generator=g)
        y = x[:, :3].argmax(1)
        return (x[8:], y[8:]), (x[:8], y[:8])
    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])
    def metrics(self, model, batch):
        return {"accuracy": ((model(batch[0]).argmax(1) == batch[1]).sum(), len(batch[1]))}
"""
SILOS = ("client-0", "client-1", "client-2")
REGIONS = {"east": SILOS[:1], "west": SILOS[1:]}
JOB: dict[str, Any] = {
    "rounds": 5,
    "regions": {"sum": True, "rounds": 3},
    "aggregation": {"validation": {"norm_ratio": "off", "weight_ratio": "off"}},
    "simulation": {
        "clients": len(SILOS),
        "backend": "sequential",
        "regions": {"members": {name: len(silos) for name, silos in REGIONS.items()}},
    },
}
POLICY = {"least_silos": 1, "most_rounds": 20}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Federation]:
    federation = Federation(tmp_path, SILOS, task=TASK)
    try:
        yield federation
    finally:
        federation.close()


def start(world: Federation, faults: dict[str, str], policy: dict[str, Any] = POLICY) -> None:
    world.coordinator(fault=faults.get("hub", ""))
    for relay, silos in REGIONS.items():
        world.relay(relay, faults.get(relay, ""), regional=policy, patience=20.0)
        for silo in silos:
            world.silo_of(relay, silo, regional_models=[relay])


def model(world: Federation, job: str) -> tuple[torch.Tensor, list[dict[str, Any]]]:
    """Waits for the job's end; its model's vector, and its rounds."""
    detail = world.finish(job)
    assert detail.job.status == "finished", detail.job.reason
    file = world.folder / f"{job}.safetensors"
    with world.operator() as operator:
        operator.get_artifact(detail.job.model.digest, detail.job.model.size, file)
    return open_model(file).vector, [json.loads(each) for each in detail.history]


def notes(world: Federation, silo: str, action: str) -> list[dict[str, Any]]:
    """What the silo's own log holds of this action."""
    lines = (world.folder / "silos" / silo / "audit.jsonl").read_text().splitlines()
    entries = [json.loads(line).get("entry", {}) for line in lines]
    return [entry["detail"] for entry in entries if entry.get("action") == action]


def summed(world: Federation, relay: str) -> list[dict[str, Any]]:
    """The statements of the sums that a relay has made, as its log has them."""
    lines = (world.folder / "relays" / relay / "sums.jsonl").read_text().splitlines()
    return [json.loads(line)["sum"]["statement"] for line in lines]


def members(world: Federation, relay: str) -> dict[int, tuple[str, ...]]:
    """Whose updates are in the relay's sums, by round."""
    found: dict[int, set[str]] = {}
    for each in summed(world, relay):
        found.setdefault(each["round"], set()).update(each["members"])
    return {number: tuple(sorted(names)) for number, names in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "place",
    ["region_moved", "update_held", "updates_summed", "region_made", "receipt_handed_on"],
)
def test_rounds_within_regions_are_those_of_the_simulation(world: Federation, place: str) -> None:
    """A relay is killed within a round of its region: it goes on, and counts each update once."""
    start(world, {"west": f"2/train/{place}"})
    config = world.job(**JOB)
    job = world.submit(config, "regional")
    assert world.died("west") == -9
    world.relay("west", regional=POLICY, patience=20.0)
    made, rounds = model(world, job)
    simulated = simulate(config, folder=world.folder)
    torch.testing.assert_close(made, simulated.model.vector, rtol=1e-5, atol=1e-6)
    assert [each["round"] for each in rounds] == [3, 5]
    for relay, silos in REGIONS.items():
        within = [each["within"][relay] for each in rounds]
        assert [[number for number, *_ in each] for each in within] == [[1, 2], [4]]
        assert all(count == len(silos) for each in within for _, count, *_ in each)
        # In a round that goes up, who comes late is in another sum of the same region.
        world.until(
            lambda relay=relay, silos=silos: members(world, relay) == dict.fromkeys(range(1, 6), silos)
        )
        # Each round's model is the one that the silos trained from in the next, as the relay has signed it.
        for silo in silos:
            asked = {(each["round"], each["phase"]): each for each in notes(world, silo, "instructed")}
            for number, _, _, digest in within[0]:
                assert asked[number + 1, "train"]["region"]["model"] == digest
            assert "region" not in asked[1, "train"]
            assert "region" not in asked[4, "train"]
            world.until(lambda silo=silo: len(notes(world, silo, "receipt")) == 2)
            receipts = notes(world, silo, "region_receipt")
            assert [each["round"] for each in receipts] == [1, 2, 4]
            assert all(each["signed"] for each in (*receipts, *notes(world, silo, "receipt")))


@pytest.mark.slow
def test_rounds_within_regions_go_on_without_a_coordinator_up_to_the_one_that_goes_up(
    world: Federation,
) -> None:
    start(world, {})
    config = world.job(**{**JOB, "rounds": 20, "regions": {"sum": True, "rounds": 20}})
    job = world.submit(config, "alone")
    sums = [world.folder / "relays" / relay / "sums.jsonl" for relay in REGIONS]
    world.until(lambda: all(path.exists() for path in sums))
    world.kill("hub")
    begun = [len(summed(world, relay)) for relay in REGIONS]
    assert max(begun) < 19
    world.until(lambda: all(len(summed(world, relay)) == 19 for relay in REGIONS))
    waiting = [world.folder / "relays" / relay / "sums" for relay in REGIONS]
    world.until(lambda: all(list(folder.glob("*.20.1.train.*.header")) for folder in waiting))
    world.coordinator()
    made, rounds = model(world, job)
    assert [each["round"] for each in rounds] == [20]
    assert set(rounds[0]["contributors"]) == set(SILOS)
    simulated = simulate(config, folder=world.folder)
    torch.testing.assert_close(made, simulated.model.vector, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_silo_refuses_what_its_own_policy_does_not_name(world: Federation) -> None:
    """One silo names another relay, so that the job stops before round 1, with the reason."""
    world.coordinator()
    world.relay("west", regional=POLICY)
    for silo, trusted in zip(SILOS, ("west", "west", "east"), strict=True):
        world.silo_of("west", silo, regional_models=[trusted])
    job = world.submit(world.job(**JOB), "refused")
    world.until(lambda: "works with models of the relays east, not of 'west'" in world.log("hub"))
    with world.operator() as operator:
        assert operator.job(job).job.rounds_done == 0
