"""The audit log, receipts and provenance of a coordinator that runs; what changes them is found."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import sqlalchemy as sa
import torch
from click.testing import CliRunner, Result
from cryptography.hazmat.primitives.asymmetric import ed25519
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_agent import ScriptedAgent
from service import AGENTS, Operator, running

from roundtable.administration import Administrator
from roundtable.cli.coordinator.audit import UNPROVEN
from roundtable.cli.coordinator.audit import audit as audit_command
from roundtable.cli.main import cli
from roundtable.client.agent.silo_log import SiloLog
from roundtable.core.errors import AuditError, StorageError
from roundtable.core.evidence.audit_log import AuditEntry, Log, compare, entry, read_log
from roundtable.core.evidence.cross_check import LogComparison, compare_logs, witnessed
from roundtable.core.evidence.provenance_check import check_provenance, is_recorded
from roundtable.core.evidence.release import release
from roundtable.core.identity.certificates import load_key
from roundtable.core.identity.credentials import SiloIdentity, create_ca, issue, load_silo_identity
from roundtable.core.identity.signing import envelope, verify
from roundtable.proto import agent_pb2, common_pb2
from roundtable.proto.receipts import receipt_values
from roundtable.server import Coordinator, ServerConfig
from roundtable.server.store import Database
from roundtable.server.store import audit as store


class Ended(NamedTuple):
    """A coordinator's identity whose certificate has ended, and a time at which it held."""

    hub: SiloIdentity
    then: float


async def exported(coordinator: Coordinator) -> list[str]:
    return [line async for page in coordinator.security.audit.lines(1) for line in page]


async def run_job(coordinator: Coordinator, operator: Operator, certificates: Path) -> Any:
    """A job of two rounds with three silos, to its end."""
    agents = [ScriptedAgent(coordinator.port, certificates / name) for name in AGENTS]
    parts = []
    for number, agent in enumerate(agents):
        await agent.connect()
        parts.append(asyncio.create_task(agent.take_part(torch.full((4,), float(number)))))
    job = await operator.submit()
    await operator.watch_until(job.id, "finished")
    for agent, part in zip(agents, parts, strict=True):
        part.cancel()
        await agent.close()
    return await operator.job(job.id)


async def test_a_job_leaves_its_traces_and_a_provenance(
    coordinator: Coordinator, operator: Operator, certificates: Path, tmp_path: Path
) -> None:
    detail = await run_job(coordinator, operator, certificates)
    ca = (certificates / "ca" / "ca.crt").read_bytes()
    log = read_log(await exported(coordinator), ca)
    assert log.sealed == len(log.entries)
    assert log.signers == {"coordinator"}
    actions = [item.action for item in log.entries]
    assert actions[0] == "coordinator_started"
    assert (log.entries[0].detail["roundtable"], log.entries[0].detail["commit"]) == release()
    assert "Operators/SubmitJob" in actions
    rounds = [item for item in log.entries if item.action == "round_committed"]
    assert [item.detail["round"] for item in rounds] == [1, 2]
    started = log.entries[0].detail
    for item in rounds:
        assert item.detail["versions"] == started
        assert item.detail["versions"]["torch"] == torch.__version__
    assert rounds[1].detail["model"] == detail.job.model.digest
    assert set(rounds[0].detail["updates"]) == set(AGENTS) == set(rounds[0].detail["contributors"])
    model, statement = tmp_path / "model.safetensors", tmp_path / "model.safetensors.provenance.json"
    model.write_bytes(await operator.fetch(detail.job.model.digest))

    def fetch() -> str:
        with Administrator(f"localhost:{coordinator.port}", certificates / "olga") as admin:
            return admin.provenance(detail.job.id)

    statement.write_text(await asyncio.to_thread(fetch))
    proof = check_provenance(model, statement, ca)
    values = proof.values
    assert (proof.signer, values["job"], len(values["rounds"])) == ("coordinator", detail.job.id, 2)
    assert is_recorded(proof, log, log.proven(time.time()))
    assert not is_recorded(proof, log, rounds[1].sequence - 1)
    participants = {name for one in values["rounds"] for name in one["participants"]}
    assert len(participants) == 3
    assert not participants & set(AGENTS)
    assert not any(name in statement.read_text() for name in AGENTS)
    said = CliRunner().invoke(cli, ["model", "verify", str(model), "--ca", str(certificates / "ca/ca.crt")])
    assert "3 silos under pseudonyms, 2 rounds" in said.output
    model.write_bytes(model.read_bytes() + b"!")
    with pytest.raises(AuditError, match="is not the model"):
        check_provenance(model, statement, ca)
    statement.write_text(statement.read_text().replace('"olga"', '"oskar"'))
    with pytest.raises(AuditError, match="proves nothing"):
        check_provenance(model, statement, ca)


CHANGES = {
    "both": [
        "UPDATE audit SET actor = 'x'",
        "DELETE FROM audit",
        "DELETE FROM seals",
        # Between, behind a gap, and in the place of the first.
        "INSERT INTO audit SELECT sequence + 5, time, 'x', action, object, detail, previous, hash FROM audit",
    ],
    "sqlite": [
        "INSERT OR REPLACE INTO audit SELECT sequence, time, 'x', action, object, detail, previous, hash "
        "FROM audit",
        "REPLACE INTO seals SELECT sequence, 'x', time FROM seals",
        "UPDATE OR REPLACE audit SET sequence = 1 WHERE sequence = 2",
    ],
    "postgresql": [
        "INSERT INTO audit SELECT sequence, time, 'x', action, object, detail, previous, hash FROM audit "
        "ON CONFLICT (sequence) DO UPDATE SET actor = 'x'",
        "TRUNCATE audit",
        "SET LOCAL session_replication_role = replica; DELETE FROM audit",
    ],
}


async def test_the_database_refuses_to_change_the_log(
    settings: Callable[..., ServerConfig], database: str
) -> None:
    async with running(settings(database=database)) as coordinator:
        await coordinator.security.audit.note("olga", "looked")
        before = await exported(coordinator)
        kind = "sqlite" if database.startswith("sqlite") else "postgresql"
        for statement in CHANGES["both"] + CHANGES[kind]:
            with pytest.raises(Exception, match="append-only"):
                await coordinator._database.write(lambda c, s=statement: c.execute(sa.text(s)))  # type: ignore[misc]
        assert await exported(coordinator) == before
        await coordinator.security.audit.note("olga", "looked again")
        assert len(await exported(coordinator)) == len(before) + 2


async def test_the_log_goes_on_over_restarts(
    settings: Callable[..., ServerConfig], certificates: Path
) -> None:
    ca = (certificates / "ca" / "ca.crt").read_bytes()
    async with running(settings()) as first:
        earlier = read_log(await exported(first), ca)
    async with running(settings()) as second:
        await second.security.audit.note("olga", "looked")
        later = read_log(await exported(second), ca)
    assert [item.action for item in later.entries] == ["coordinator_started", "coordinator_started", "looked"]
    compare(earlier, later)
    with pytest.raises(AuditError, match="missing in the later"):
        compare(later, earlier)


async def test_refusals_are_written_and_a_flood_of_them_is_counted(coordinator: Coordinator) -> None:
    audit = coordinator.security.audit
    for number in range(1000):
        audit.refused("eve", "Operators/Status", f"attempt {number}", f"ipv4:192.0.2.{number % 250}")
    lines = await exported(coordinator)
    refused = [json.loads(line)["entry"] for line in lines if '"action":"refused"' in line]
    assert len(refused) == 61, "sixty at once of all callers, and how many more there were"
    assert refused[-1]["detail"] == {"further_refusals": 940}


async def test_refusals_wait_while_the_database_is_away(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit = coordinator.security.audit
    for number in range(30):
        audit.refused("eve", "Operators/Status", f"attempt {number}", "ipv4:192.0.2.1")

    async def away(change: object) -> None:
        raise StorageError("the database is away")

    with monkeypatch.context() as patch:
        patch.setattr(audit._database, "write", away)
        with pytest.raises(StorageError):
            await audit.seal()
    audit.refused("mallory", "Operators/Status", "later", "ipv4:192.0.2.2")
    entries = [json.loads(line)["entry"] for line in await exported(coordinator) if '"refused"' in line]
    assert [each["actor"] for each in entries] == ["eve"] * 10 + ["mallory", "coordinator"]
    assert entries[-1]["detail"] == {"further_refusals": 20}


async def test_a_receipt_is_signed_by_the_coordinator(
    coordinator: Coordinator, operator: Operator, certificates: Path
) -> None:
    ca = (certificates / "ca" / "ca.crt").read_bytes()
    async with ScriptedAgent(coordinator.port, certificates / "alder") as agent:
        identity = agent.welcome.identity
        await operator.submit("[cohort]\nminimum = 1\nsize = 1\nwait = 0", rounds=1)
        instruction = await agent.expect("instruction")
        data = torch.zeros(4).numpy().tobytes()
        from scripted_agent import header_for

        header = header_for(instruction, data)
        receipt = await agent.upload(header, data)
        assert instruction.submission.submitter == "olga"
    values = receipt_values("alder", header, receipt)
    assert verify(identity, ca, "coordinator", "receipt", values, receipt.signature) == "coordinator"
    assert values["status"] == "ACCEPTED"
    assert receipt.sealed_hash == read_log(await exported(coordinator), ca).hash_of(receipt.sealed) != ""


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an authority."""
    return create_ca(tmp_path_factory.mktemp("authority") / "ca").parent


@pytest.fixture(scope="session")
def signers(
    authority: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[bytes, SiloIdentity, SiloIdentity]:
    """The root's certificate, and identities of a coordinator and a silo."""
    folder, ca = tmp_path_factory.mktemp("signers"), (authority / "ca.crt").read_bytes()
    issue(authority, "hub", "coordinator", folder / "hub", ["localhost"])
    issue(authority, "north", "agent", folder / "north")
    return ca, load_silo_identity(folder / "hub"), load_silo_identity(folder / "north")


def made_log(
    signer: SiloIdentity, count: int, signed: float | None = None, earlier: Sequence[str] = ()
) -> list[str]:
    """Entries with a seal after every third, signed now or at another time, behind an earlier log's."""
    lines = list(earlier)
    known = [AuditEntry(**json.loads(line)["entry"]) for line in lines if line.startswith('{"entry"')]
    last = known[-1] if known else None
    for number in range(len(known) + 1, len(known) + count + 1):
        last = entry(float(number), "olga", "did", f"job {number}", {"n": number}).after(last)
        lines.append(last.to_line())
        if number % 3 == 0 or number == len(known) + count:
            values = {"sequence": last.sequence, "hash": last.hash, "time": signed or time.time()}
            lines.append(json.dumps({"seal": envelope(signer, "seal", values)}))
    return lines


@settings(max_examples=200, deadline=None)
@given(data=st.data(), count=st.integers(4, 12))
def test_any_entry_that_is_changed_removed_or_moved_is_found(
    signers: tuple[bytes, SiloIdentity, SiloIdentity], data: st.DataObject, count: int
) -> None:
    ca, hub, _ = signers
    lines = made_log(hub, count)
    assert len(read_log(lines, ca).entries) == count
    entries = [place for place, line in enumerate(lines) if line.startswith('{"entry"')]
    place = data.draw(st.sampled_from(entries))
    how = data.draw(st.sampled_from(["change", "remove", "repeat", "swap", "forge"]))
    changed = list(lines)
    if how == "change":
        letter = data.draw(st.integers(10, len(lines[place]) - 3))
        changed[place] = lines[place][:letter] + "~" + lines[place][letter + 1 :]
    elif how == "remove":
        del changed[place]
    elif how == "repeat":
        changed.insert(place, lines[place])
    elif how == "swap":
        other = data.draw(st.sampled_from([one for one in entries if one != place]))
        changed[place], changed[other] = changed[other], changed[place]
    else:
        # The whole rest of the chain is made anew, as only somebody could who holds no signing key.
        found = [AuditEntry(**json.loads(lines[one])["entry"]) for one in entries]
        index = entries.index(place)
        last = found[index - 1] if index else None
        for one, old in zip(entries[index:], found[index:], strict=True):
            last = entry(old.time, "eve", old.action, old.object, old.detail).after(last)
            changed[one] = last.to_line()
    with pytest.raises(AuditError):
        read_log(changed, ca)


def test_a_log_of_somebody_else_or_signed_by_a_silo_is_refused(
    signers: tuple[bytes, SiloIdentity, SiloIdentity], tmp_path: Path
) -> None:
    ca, hub, north = signers
    with pytest.raises(AuditError, match="does not hold"):
        read_log(made_log(north, 3), ca)
    other = create_ca(tmp_path / "other").read_bytes()
    with pytest.raises(AuditError, match="not issued by"):
        read_log(made_log(hub, 3), other)


def test_a_log_that_nobody_has_signed_is_not_sound(
    signers: tuple[bytes, SiloIdentity, SiloIdentity], tmp_path: Path
) -> None:
    ca, hub, _ = signers
    lines = made_log(hub, 4)
    authority, file = tmp_path / "ca.crt", tmp_path / "audit.jsonl"
    authority.write_bytes(ca)

    def verified(kept: list[str], *more: str) -> Result:
        file.write_text("".join(f"{line}\n" for line in kept))
        words = ["audit", "verify", str(file), "--ca", str(authority), *more]
        return CliRunner().invoke(cli, words, standalone_mode=False)

    said = verified(lines, "--json")
    assert json.loads(said.output) == {
        "entries": 4,
        "signed": 4,
        "proven": 4,
        "not_at_hand": 0,
        "signers": ["hub"],
    }
    assert said.return_value == 0
    for kept, reason in (([], "empty"), ([one for one in lines if "entry" in one[:9]], "nobody has signed")):
        said = verified(kept)
        assert isinstance(said.exception, AuditError)
        assert reason in str(said.exception)
    forged = entry(5.0, "coordinator", "round_committed", "j").after(
        AuditEntry(**json.loads(lines[-2])["entry"])
    )
    for kept, tail in ((lines[:-1], "4 to 4"), ([*lines, forged.to_line()], "5 to 5")):
        said = verified(kept)
        assert said.return_value == UNPROVEN
        assert f"UNPROVEN: entries {tail} are chained, but not signed" in said.output


@pytest.fixture(scope="session")
def ended(authority: Path, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A coordinator whose certificate ended long ago; who has its key today can still sign."""
    start = datetime.now(UTC) - timedelta(days=400)
    out = tmp_path_factory.mktemp("ended") / "hub"
    issue(authority, "hub", "coordinator", out, ["localhost"], days=30, start=start)
    key = load_key(out / "identity.key")
    assert isinstance(key, ed25519.Ed25519PrivateKey)
    identity = SiloIdentity((out / "identity.crt").read_bytes(), key)
    return Ended(identity, (start + timedelta(days=10)).timestamp())


def test_a_signature_outlives_its_certificate_and_is_proven_by_a_later_one(
    signers: tuple[bytes, SiloIdentity, SiloIdentity], ended: Ended
) -> None:
    ca, hub, _ = signers
    old = made_log(ended.hub, 4, ended.then)
    log = read_log(old, ca)
    assert (log.sealed, log.proven(time.time()), log.proven(ended.then)) == (4, 0, 4)
    log = read_log(made_log(hub, 3, earlier=old), ca)
    assert (log.sealed, log.proven(time.time())) == (7, 7)
    # What states a time at which its certificate did not hold is no signature at all.
    with pytest.raises(AuditError, match="expired on"):
        read_log(made_log(ended.hub, 4), ca)


@pytest.mark.parametrize("rewritten", [False, True])
def test_a_silo_is_a_witness_of_a_log_whose_certificate_has_ended(
    signers: tuple[bytes, SiloIdentity, SiloIdentity], ended: Ended, tmp_path: Path, rewritten: bool
) -> None:
    """The silo's receipts name what the log held; the log of a thief of the old key contradicts them."""
    ca, _, north = signers
    log = read_log(lines := made_log(ended.hub, 5, ended.then), ca)
    journal = SiloLog(tmp_path / "silo.jsonl", tmp_path)
    header = agent_pb2.UploadHeader(step=common_pb2.Step(job="j", round=1, attempt=1, phase="train"))
    receipt = agent_pb2.UploadReceipt(status=agent_pb2.UploadReceipt.ACCEPTED, time=ended.then)
    receipt.sealed, receipt.sealed_hash = 3, log.hash_of(3)
    values = receipt_values("north", header, receipt)
    document = envelope(ended.hub, "receipt", values)
    proof = {name: document[name] for name in ("signature", "certificate")}
    journal.note("coordinator", "receipt", "j", **values, signed=True, **proof)
    last = AuditEntry(**json.loads((tmp_path / "silo.jsonl").read_text())["entry"])
    unsigned = read_log((tmp_path / "silo.jsonl").read_text().splitlines(), ca, "agent")
    assert witnessed(log, unsigned, ca) == []
    with (tmp_path / "silo.jsonl").open("a") as file:
        values = {"sequence": last.sequence, "hash": last.hash, "time": time.time()}
        file.write(json.dumps({"seal": envelope(north, "seal", values)}) + "\n")
    if rewritten:
        first = entry(1.0, "eve", "did", "something else", {}).after(None)
        values = {"sequence": 1, "hash": first.hash, "time": ended.then}
        seal = json.dumps({"seal": envelope(ended.hub, "seal", values)})
        lines = made_log(ended.hub, 4, ended.then, [first.to_line(), seal])
    (tmp_path / "ca.crt").write_bytes(ca)
    (tmp_path / "log.jsonl").write_text("\n".join(lines))

    def verified(*more: str) -> Result:
        words = ["audit", "verify", str(tmp_path / "log.jsonl"), "--ca", str(tmp_path / "ca.crt"), *more]
        return CliRunner().invoke(cli, words, standalone_mode=False)

    alone, beside = verified(), verified("--witness", str(tmp_path / "silo.jsonl"))
    assert alone.return_value == UNPROVEN
    assert "UNPROVEN: entries 1 to 5. Their signature's certificate ended on" in alone.output
    if rewritten:
        assert "history was rewritten" in str(beside.exception)
    else:
        assert "UNPROVEN: entries 4 to 5. Their" in beside.output


async def test_entries_that_stood_unsigned_at_a_start_are_marked(
    settings: Callable[..., ServerConfig], certificates: Path
) -> None:
    """Who can write the database between two runs adds an entry: the next start signs it, and says so."""
    config = settings()
    async with running(config):
        pass
    database = Database.open(config.database)
    forged = entry(time.time(), "coordinator", "round_committed", "j", {"model": "0" * 64})
    await database.write(lambda connection: store.append(connection, forged))
    database.close()
    async with running(config) as coordinator:
        log = read_log(await exported(coordinator), (certificates / "ca" / "ca.crt").read_bytes())
    assert log.entries[2].detail["unsigned"] == [2, 2]
    assert "unsigned" not in log.entries[0].detail


@given(text=st.text(max_size=300) | st.binary(max_size=300).map(lambda raw: raw.decode(errors="replace")))
def test_what_is_no_log_is_one_clear_error(
    signers: tuple[bytes, SiloIdentity, SiloIdentity], text: str
) -> None:
    with pytest.raises(AuditError, match="line") if text.strip() else nullcontext():
        assert read_log(text.splitlines(), signers[0]).entries == []


def both_logs(signers: tuple[bytes, SiloIdentity, SiloIdentity], folder: Path) -> tuple[Log, Log, bytes]:
    """Two rounds as the coordinator and the silo north wrote them down."""
    ca, hub, _ = signers
    journal = SiloLog(folder / "audit.jsonl", folder)
    last, lines = None, []
    for number in (1, 2):
        step = common_pb2.Step(job="j", round=number, attempt=1, phase="train")
        header = agent_pb2.UploadHeader(
            step=step, content=common_pb2.Artifact(digest=f"{number}" * 64, size=16)
        )
        receipt = agent_pb2.UploadReceipt(status=agent_pb2.UploadReceipt.ACCEPTED, time=time.time())
        values = receipt_values("north", header, receipt)
        document = envelope(hub, "receipt", values)
        journal.note("coordinator", "instructed", "j", config="c" * 64, round=number)
        proof = {name: document[name] for name in ("signature", "certificate")}
        journal.note("coordinator", "receipt", "j", **values, signed=True, **proof)
        detail = {"config": "c" * 64, "round": number, "attempt": 1, "cohort": ["north"]}
        detail |= {"updates": {"north": f"{number}" * 64}}
        last = entry(time.time() + 60, "coordinator", "round_committed", "j", detail).after(last)
        lines.append(last.to_line())
    silo = read_log((folder / "audit.jsonl").read_text().splitlines(), ca, "agent")
    return read_log(lines, ca), silo, ca


def test_two_logs_that_agree(signers: tuple[bytes, SiloIdentity, SiloIdentity], tmp_path: Path) -> None:
    coordinator, silo, ca = both_logs(signers, tmp_path)
    assert compare_logs(coordinator, silo, "north", ca) == LogComparison()


def alter(log: Log, index: int, **changes: Any) -> None:
    """Another entry in the place of one; the chain is not looked at any more."""
    log.entries[index] = replace(log.entries[index], **changes)


RECEIPT_LOST = {"action": "sent"}


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        (lambda c, s: c.entries[0].detail["updates"].update(north="f" * 64), "contradictions", "never sent"),
        (lambda c, s: c.entries[0].detail["updates"].clear(), "contradictions", "holds none"),
        (lambda c, s: c.entries[0].detail.update(config="e" * 64), "contradictions", "another configuration"),
        (lambda c, s: s.entries.pop(1), "contradictions", "never sent"),
        (lambda c, s: s.entries[1].detail.update(sealed_hash="f" * 64), "lost", "proves nothing"),
        (lambda c, s: s.entries[1].detail.update(signature="00" * 64), "lost", "proves nothing"),
        (lambda c, s: s.entries[1].detail.pop("signature"), "lost", "proves nothing"),
        (lambda c, s: s.entries[1].detail.update(time=5.0), "lost", "proves nothing"),
        (lambda c, s: alter(s, 1, **RECEIPT_LOST), "lost", "sent its update and has no receipt"),
        (lambda c, s: alter(s, 3, **RECEIPT_LOST), "pending", "no proof yet"),
        (lambda c, s: (s.entries.pop(1), alter(c, 0, time=1.0)), "lost", "log begins only later"),
    ],
)
def test_two_logs_that_do_not_agree(
    signers: tuple[bytes, SiloIdentity, SiloIdentity],
    tmp_path: Path,
    change: Callable[[Log, Log], None],
    kind: str,
    said: str,
) -> None:
    coordinator, silo, ca = both_logs(signers, tmp_path)
    change(coordinator, silo)
    found = compare_logs(coordinator, silo, "north", ca)
    assert said in " ".join(getattr(found, kind))
    assert kind == "contradictions" or not found.contradictions


@pytest.mark.parametrize(
    ("kept", "sent", "code", "word"),
    [
        (2, (), 0, "Both logs agree"),
        (1, (), 1, "CONTRADICTION"),
        (1, (2, 3), 3, "UNPROVEN"),
        (1, (2,), 4, "WAITING"),
    ],
)
def test_cross_check_says_by_its_exit_code_what_kind_of_difference_there_is(
    signers: tuple[bytes, SiloIdentity, SiloIdentity],
    tmp_path: Path,
    kept: int,
    sent: tuple[int, ...],
    code: int,
    word: str,
) -> None:
    coordinator, silo, ca = both_logs(signers, tmp_path)
    last = coordinator.entries[-1]
    values = {"sequence": last.sequence, "hash": last.hash, "time": time.time()}
    lines = [entry.to_line() for entry in coordinator.entries]
    lines.append(json.dumps({"seal": envelope(signers[1], "seal", values)}))
    (tmp_path / "theirs").write_text("\n".join(lines))
    own = SiloLog(tmp_path / "own", tmp_path)
    for item in silo.entries[: 2 * kept]:
        own.note(item.actor, item.action, item.object, **item.detail)
    for number in sent:
        own.note("north", "sent", "j", round=number, attempt=1, update=f"{number}" * 64)
    (tmp_path / "ca.crt").write_bytes(ca)
    files = [str(tmp_path / name) for name in ("theirs", "own", "ca.crt")]
    arguments = ["cross-check", files[0], files[1], "--ca", files[2]]
    said = CliRunner().invoke(audit_command, arguments, standalone_mode=False)
    assert (said.return_value, word in said.output) == (code, True), said.output
    told = CliRunner().invoke(audit_command, [*arguments, "--json"], standalone_mode=False)
    assert sum(bool(json.loads(told.output)[kind]) for kind in ("contradictions", "lost", "pending")) == (
        code > 0
    )


async def test_a_refused_transaction_leaves_no_entry(tmp_path: Path) -> None:
    database = Database.open(f"sqlite:///{tmp_path / 'c.db'}")

    def fails(connection: Any) -> None:
        store.append(connection, entry(1.0, "olga", "did"))
        raise RuntimeError

    with pytest.raises(RuntimeError):
        await database.write(fails)
    assert await database.read(lambda connection: store.lines(connection, 1, 10)) == ([], 1)
    database.close()
