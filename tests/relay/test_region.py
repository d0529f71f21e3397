"""A region in processes of its own: coordinator, relay and silos, over TLS, killed where it hurts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import SILOS, Federation

from roundtable.core.identity.credentials import issue
from roundtable.core.identity.revocation import revoke


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Federation]:
    federation = Federation(tmp_path)
    try:
        yield federation
    finally:
        federation.close()


def finished(world: Federation, job: str) -> list[str]:
    """Waits for the job's end; the digests of its models, round by round."""
    detail = world.finish(job)
    assert detail.job.status == "finished", detail.job.reason
    return [json.loads(each)["model"] for each in detail.history]


def notes(world: Federation, silo: str, action: str) -> list[dict[str, object]]:
    """What the silo's own log holds of this action."""
    lines = (world.folder / "silos" / silo / "audit.jsonl").read_text().splitlines()
    entries = [json.loads(line).get("entry", {}) for line in lines]
    return [entry["detail"] for entry in entries if entry.get("action") == action]


def flat(world: Federation, **tables: object) -> list[str]:
    """The models of a coordinator that all silos have connected to themselves."""
    for silo in SILOS:
        world.agent(silo)
    return finished(world, world.submit(world.job(**tables), "flat"))


@pytest.mark.parametrize(
    "tables",
    [pytest.param({}, marks=pytest.mark.slow), {"transfer": {"down": "bfloat16"}}],
    ids=["whole", "changes"],
)
def test_a_region_gives_the_bits_of_silos_that_connect_themselves(
    world: Federation, tables: dict[str, object]
) -> None:
    world.coordinator()
    world.relay()
    for silo in SILOS[:2]:
        world.silo_of("east", silo)
    world.agent(SILOS[2])
    through = finished(world, world.submit(world.job(**tables), "by a relay"))
    # Receipts are the coordinator's own, signed for each silo.
    assert all(note["signed"] for silo in SILOS for note in notes(world, silo, "receipt"))
    for silo in SILOS:
        world.kill(silo)
    assert through == flat(world, **tables)
    assert len(set(through)) == 3


@pytest.mark.parametrize(
    "place",
    ["2/train/update_held", pytest.param("2/train/receipt_handed_on", marks=pytest.mark.slow)],
)
def test_a_relay_that_is_killed_goes_on_with_what_it_holds(world: Federation, place: str) -> None:
    world.coordinator()
    world.relay(fault=place)
    for silo in SILOS:
        world.silo_of("east", silo)
    job = world.submit(world.job(), "killed")
    assert world.died("east") == -9
    held = list((world.folder / "relays" / "east" / "updates").glob("*.json"))
    assert held
    world.relay()
    through = finished(world, job)
    for silo in SILOS:
        world.kill(silo)
    assert through == flat(world)


@pytest.mark.slow
def test_updates_wait_at_the_relay_while_its_parent_is_gone_and_a_silo_too(world: Federation) -> None:
    """The coordinator dies as the second round's updates come; two silos then leave, and never come back."""
    world.coordinator(fault="2/train/update_part")
    world.relay(patience=0.5)
    for silo in SILOS:
        world.silo_of("east", silo)
    job = world.submit(world.job(rounds=2, evaluation={"every": 0}), "away")
    assert world.died("hub") == -9
    updates = world.folder / "relays" / "east" / "updates"
    world.until(lambda: len(list(updates.glob("*.json"))) == len(SILOS))
    world.until(lambda: all(len(notes(world, silo, "held")) == 1 for silo in SILOS))
    assert all(note["signed"] for silo in SILOS for note in notes(world, silo, "held"))
    for silo in SILOS[:2]:
        world.kill(silo)
    world.coordinator()
    assert len(set(finished(world, job))) == 2
    assert list(updates.glob("*.json")) == []


def test_a_relay_speaks_for_no_silo_that_has_not_signed_so(world: Federation) -> None:
    """One silo has named another relay, one none at all, one shows credentials without an identity."""
    world.coordinator()
    world.relay()
    issue(world.folder / "ca", "west", "relay", world.folder / "west", hosts=("localhost",))
    address = f"127.0.0.1:{world.relay_ports['east']}"
    world.agent("elm", coordinator=address, relay="west")
    world.agent("birch", coordinator=address)
    (world.folder / "poplar" / "identity.key").unlink()
    world.agent("poplar", coordinator=address, relay="east")
    for silo in SILOS[:2]:
        assert world.died(silo) != 0
    world.until(lambda: "identity.key" in world.log("poplar"))
    assert world.log("hub").count("has not signed that the relay 'east' may speak for it") == 2
    with world.operator() as operator:
        assert operator.status().clients_online == 0


@pytest.mark.slow
@pytest.mark.parametrize("dies", ["east", "west", "hub"])
def test_a_relay_behind_a_relay_gives_the_same_bits_whichever_is_killed(world: Federation, dies: str) -> None:
    """One silo is two relays away, one is one, one connects itself; the second round meets the kill."""
    faults = {
        "east": "2/train/update_held",
        "west": "2/train/receipt_handed_on",
        "hub": "2/train/update_part",
    }

    def start(name: str, fault: str = "") -> None:
        if name == "hub":
            world.coordinator(fault=fault)
        else:
            above = {"west": world.relay_ports.get("east", 0)}
            world.relay(name, fault, parent=above.get(name, 0), patience=0.5)

    for name in ("hub", "east", "west"):
        start(name, faults[name] if name == dies else "")
    world.silo_of("west/east", SILOS[0])
    world.silo_of("east", SILOS[1])
    world.agent(SILOS[2])
    job = world.submit(world.job(), "a tree")
    assert world.died(dies) == -9
    start(dies)
    through = finished(world, job)
    updates = [world.folder / "relays" / name / "updates" for name in ("east", "west")]
    world.until(lambda: not any(list(folder.glob("*.json")) for folder in updates))
    # The coordinator's own receipt has come down both relays.
    assert notes(world, SILOS[0], "receipt")[-1]["signed"]
    for silo in SILOS:
        world.kill(silo)
    assert through == flat(world)


def test_a_relay_behind_a_relay_ends_once_it_is_on_the_list(world: Federation) -> None:
    """The upper relay gets the list as a file while the lower one's stream is open; no coordinator runs."""
    world.relay("east", parent=1)
    world.relay("west", parent=world.relay_ports["east"])
    world.until(lambda: "connected to 127.0.0.1" in world.log("west"))
    gone = revoke(world.folder / "ca", world.folder / "west" / "node.crt")
    (world.folder / "east" / "crl.pem").write_bytes(gone.read_bytes())
    assert world.died("west") > 0
    assert "the certificate of 'west' has been revoked" in world.log("west")
