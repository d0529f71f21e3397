"""Relays that add up, in processes of their own: the model of all silos' updates, whoever is killed when."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import SILOS, Federation

from roundtable.core.models import open_model

SUMS = {
    "rounds": 2,
    "regions": {"sum": True},
    "aggregation": {"validation": {"norm_ratio": "off", "weight_ratio": "off"}},
}
FLAT = {**SUMS, "regions": {"sum": False}}
MASKED = {
    **SUMS,
    "privacy": {"level": "none", "secure_aggregation": True, "clip_norm": 20.0},
    "evaluation": {"every": 0},
}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Federation]:
    federation = Federation(tmp_path)
    try:
        yield federation
    finally:
        federation.close()


def model(world: Federation, job: str) -> tuple[torch.Tensor, list[dict[str, Any]]]:
    """Waits for the job's end; its model's vector, and its rounds."""
    detail = world.finish(job)
    assert detail.job.status == "finished", detail.job.reason
    rounds = [json.loads(each) for each in detail.history]
    file = world.folder / f"{job}.safetensors"
    with world.operator() as operator:
        operator.get_artifact(detail.job.model.digest, detail.job.model.size, file)
    return open_model(file).vector, rounds


def summed(world: Federation, relay: str = "east") -> list[dict[str, Any]]:
    """The sums that a relay has made, as its log has them."""
    path = world.folder / "relays" / f"{relay}" / "sums.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def receipts(world: Federation, silo: str) -> list[dict[str, Any]]:
    """The coordinator's receipts, as the silo's own log has them."""
    lines = (world.folder / "silos" / silo / "audit.jsonl").read_text().splitlines()
    entries = [json.loads(line).get("entry", {}) for line in lines]
    return [entry["detail"] for entry in entries if entry.get("action") == "receipt"]


def flat(world: Federation) -> torch.Tensor:
    """The model of the same silos where relays hand each update on: bit for bit that of a coordinator without
    relays, as test_region.py has it."""
    return model(world, world.submit(world.job(**FLAT), "flat"))[0]


@pytest.mark.slow
@pytest.mark.parametrize("dies", ["east", "west", ""])
def test_a_tree_of_relays_gives_the_flat_sum(world: Federation, dies: str) -> None:
    """One silo is two relays away and one is one: they are one sum, in which a sum lies. One connects itself.
    A relay is killed once its sum of round 2 is on its disk."""
    world.coordinator()
    faults = {dies: "2/train/updates_summed"}
    world.relay("east", faults.get("east", ""))
    world.relay("west", faults.get("west", ""), parent=world.relay_ports["east"])
    world.silo_of("west/east", SILOS[0])
    world.silo_of("east", SILOS[1])
    world.agent(SILOS[2])
    job = world.submit(world.job(**SUMS), "a tree")
    if dies:
        assert world.died(dies) == -9
        world.relay(dies, parent=world.relay_ports["east"] if dies == "west" else 0)
    through, rounds = model(world, job)
    first = {}
    for relay in ("west", "east"):
        world.until(lambda relay=relay: len(summed(world, relay)) >= 2)
        statement = summed(world, relay)[0]["sum"]["statement"]
        first[relay] = [*statement["members"], *(name for name, _ in statement["sums"])]
    assert first == {"west": [SILOS[0]], "east": [SILOS[1], "west"]}
    assert all(set(each["contributors"]) == set(SILOS) for each in rounds)
    # Receipts are the coordinator's own, for the update that the silo itself has signed.
    world.until(lambda: all(len(receipts(world, silo)) >= 2 for silo in SILOS))
    assert all(note["signed"] for silo in SILOS for note in receipts(world, silo))
    torch.testing.assert_close(through, flat(world), rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["update_held", "updates_summed", "receipt_handed_on"])
@pytest.mark.parametrize("tables", [SUMS, MASKED], ids=["plain", "masked"])
def test_a_relay_that_is_killed_counts_nobody_twice(
    world: Federation, place: str, tables: dict[str, Any]
) -> None:
    world.coordinator()
    world.relay(fault=f"2/train/{place}")
    for silo in SILOS:
        world.silo_of("east", silo)
    job = world.submit(world.job(**tables), "killed")
    assert world.died("east") == -9
    world.relay()
    through, rounds = model(world, job)
    assert all(set(each["contributors"]) == set(SILOS) for each in rounds)
    state = world.folder / "relays" / "east"
    world.until(lambda: not [*(state / "updates").glob("*.json"), *(state / "sums").iterdir()])
    # Masked, each silo rounds at random, by less than 20 / 2^16.
    torch.testing.assert_close(through, flat(world), rtol=1e-5, atol=1e-3 if "privacy" in tables else 1e-7)
