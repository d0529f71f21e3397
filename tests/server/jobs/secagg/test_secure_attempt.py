"""An attempt's journal: whatever moment the coordinator dies at, the attempt goes on to the same sum."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from file_limit import files_of_at_most

from roundtable.core import parse_job
from roundtable.core.config import JobConfig
from roundtable.core.errors import ProtocolError, ResourceError, StorageError
from roundtable.engine import GroupMeans
from roundtable.engine.messages import Step
from roundtable.privacy import SecureRound
from roundtable.privacy.secagg import Ed25519Signer, MemoryReleases, SecAggClient, ServerPhase
from roundtable.privacy.secagg.masks import add_wire, pack, ring_dtype
from roundtable.server.jobs.secagg.journal import Journal
from roundtable.server.jobs.secagg.secure_attempt import SecureAttempt
from roundtable.server.jobs.sessions import Identity

NAMES = ("alder", "birch", "cedar", "dogwood")
COLUMNS = 60
STEP = Step(2, 1, "train")
SUBJECT = bytes(range(32))
JOB = parse_job('task = "t"\n[privacy]\nlevel = "none"\nsecure_aggregation = true\nclip_norm = 1.0')
TWELVE = tuple(f"silo-{place:02d}" for place in range(12))
GROUPED = parse_job(
    'task = "t"\n[aggregation]\nrule = "median"\n'
    "[privacy]\nlevel = 'none'\nsecure_aggregation = true\nclip_norm = 1.0\ngroup_size = 3"
)


class Silos:
    """Silos that always answer the same, as real ones do."""

    def __init__(
        self, folder: Path, lost: str = "", names: tuple[str, ...] = NAMES, job: JobConfig = JOB
    ) -> None:
        self.folder, self.lost, self.job = folder, lost, job
        self.signers = {name: Ed25519Signer() for name in names}
        self.round = SecureRound.of(job, COLUMNS, len(names), STEP.round)
        directory = {name: signer.public for name, signer in self.signers.items()}
        session = self.round.session("job", STEP.round, STEP.attempt, SUBJECT)
        self.clients = {
            name: SecAggClient(session, self.round.parameters, name, signer, directory, MemoryReleases())
            for name, signer in self.signers.items()
        }
        self.adverts = {name: client.advertise() for name, client in self.clients.items()}
        self.uploads: dict[str, bytes] = {}
        self.summed = False

    def identities(self) -> dict[str, Identity]:
        return {name: Identity(b"pem", signer.public) for name, signer in self.signers.items()}

    def body(self, digest: str) -> Path:
        return self.folder / digest

    def mask(self) -> dict[str, str]:
        """The digests of the masked vectors of those who deliver one."""
        for place, (name, client) in enumerate(self.clients.items()):
            if name not in self.uploads and name != self.lost:
                value = (0.01 if self.round.grouped else 0.02) * place
                source = self.round.encode(np.full(COLUMNS, value, dtype=np.float32), 10, 1.0)
                data = b"".join(bytes(chunk) for chunk in client.masked_chunks(source))
                self.uploads[name] = data
                self.body(blake3(data).hexdigest()).write_bytes(data)
        return {name: blake3(data).hexdigest() for name, data in self.uploads.items()}

    def load(self, digest: str) -> bytes:
        """Reads a masked upload back."""
        return self.body(digest).read_bytes()


def go_on(attempt: SecureAttempt, silos: Silos) -> bool:
    """One step that the coordinator and the silos take next; False at the end."""
    if attempt.phase is ServerPhase.DONE:
        return False
    if attempt.phase is ServerPhase.MASKED:
        for name, message in attempt.outgoing.items():
            silos.clients[name].handle(message) if name not in silos.uploads else None
        bodies = silos.mask()
        for name in bodies:
            attempt.announce(name, silos.clients[name].masked())
        here = sorted(bodies)
        if silos.summed:
            total = np.zeros(silos.round.length, ring_dtype(32))
            for name in here[1:]:
                add_wire(total, memoryview(silos.uploads[name]), 32)
            silos.body("sum").write_bytes(pack(total, 32))
            attempt.fold_sum(here[1:], "sum", silos.load)
            here = here[:1]
        attempt.fold({name: bodies[name] for name in here}, silos.load)
    elif attempt.phase is ServerPhase.ADVERTISE:
        for advert in silos.adverts.values():
            attempt.receive(advert)
    else:
        for name, message in attempt.outgoing.items():
            answer = silos.clients[name].handle(message)
            assert answer is not None
            attempt.receive(answer)
    attempt.advance()
    return True


def begin(folder: Path, silos: Silos) -> SecureAttempt:
    return SecureAttempt.begin(
        "job", silos.job, COLUMNS, STEP, folder / "journal", silos.identities(), SUBJECT
    )


def resume(folder: Path, silos: Silos) -> SecureAttempt:
    return SecureAttempt.resume("job", silos.job, COLUMNS, STEP, folder / "journal", silos.load)


@pytest.mark.parametrize(("lost", "summed"), [("", False), ("birch", False), ("birch", True)])
def test_an_attempt_can_be_taken_up_in_every_phase(tmp_path: Path, lost: str, summed: bool) -> None:
    silos = Silos(tmp_path, lost)
    silos.summed = summed
    attempt = begin(tmp_path, silos)
    while True:
        phase, told = attempt.phase, attempt.outgoing
        attempt.journal.close(forget=False)
        attempt = resume(tmp_path, silos)
        assert (attempt.phase, attempt.outgoing) == (phase, told)
        if not go_on(attempt, silos):
            break
    survivors = [place for place, name in enumerate(NAMES) if name != lost]
    mean = attempt.decode()
    assert (mean.account["silos"], mean.account["weight"]) == (len(survivors), 10 * len(survivors))
    assert mean.vector.numpy() == pytest.approx(0.02 * np.mean(survivors), abs=1e-4)


@pytest.mark.parametrize("lost", ["", "silo-07"])
def test_groups_can_be_taken_up_in_every_phase(tmp_path: Path, lost: str) -> None:
    """The draw of the groups, the loss of one and each group's sum follow from the journal."""
    silos = Silos(tmp_path, lost, TWELVE, GROUPED)
    attempt = begin(tmp_path, silos)
    phases = []
    while True:
        phase, told = attempt.phase, attempt.outgoing
        phases.append(phase)
        attempt.journal.close(forget=False)
        attempt = resume(tmp_path, silos)
        assert (attempt.phase, attempt.outgoing) == (phase, told)
        if not go_on(attempt, silos):
            break
    assert ServerPhase.REVEAL in phases
    means = attempt.decode(set(TWELVE) - {lost})
    assert isinstance(means, GroupMeans)
    assert len(means.groups) == (3 if lost else 4)
    assert len(means.lost) == (2 if lost else 0)
    for row, group in zip(means.matrix.block(0, COLUMNS), means.groups, strict=True):
        expected = 0.01 * np.mean([TWELVE.index(name) for name in group.members])
        assert row.numpy() == pytest.approx(expected, abs=1e-4)
    attempt.close(forget=True)
    assert not list(tmp_path.glob("journal*"))


def test_half_a_line_at_the_end_is_as_if_it_had_not_been_written(tmp_path: Path) -> None:
    silos = Silos(tmp_path)
    attempt = begin(tmp_path, silos)
    go_on(attempt, silos)
    attempt.journal.close(forget=False)
    path = tmp_path / "journal"
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.rindex(b'["advance"') + 6])
    attempt = resume(tmp_path, silos)
    assert attempt.phase is ServerPhase.ADVERTISE
    while go_on(attempt, silos):
        pass
    assert attempt.decode().account["silos"] == 4


def test_folding_again_after_a_crash_counts_nobody_twice(tmp_path: Path) -> None:
    silos = Silos(tmp_path)
    attempt = begin(tmp_path, silos)
    while attempt.phase is not ServerPhase.MASKED:
        go_on(attempt, silos)
    for name, message in attempt.outgoing.items():
        silos.clients[name].handle(message)
    bodies = silos.mask()
    for name in bodies:
        attempt.announce(name, silos.clients[name].masked())
    attempt.fold({name: bodies[name] for name in ("alder", "birch")}, silos.load)
    attempt.journal.close(forget=False)
    attempt = resume(tmp_path, silos)
    while go_on(attempt, silos):
        pass
    assert attempt.decode().account["weight"] == 40


def test_a_journal_without_a_beginning_is_no_attempt(tmp_path: Path) -> None:
    silos = Silos(tmp_path)
    (tmp_path / "journal").write_text('["silos", "e30')
    with pytest.raises(StorageError, match="has no beginning"):
        resume(tmp_path, silos)
    assert not (tmp_path / "journal").exists()


def test_a_false_upload_is_not_added(tmp_path: Path) -> None:
    silos = Silos(tmp_path)
    attempt = begin(tmp_path, silos)
    while attempt.phase is not ServerPhase.MASKED:
        go_on(attempt, silos)
    for name, message in attempt.outgoing.items():
        silos.clients[name].handle(message)
    bodies = silos.mask()
    announcement = silos.clients["alder"].masked()
    digest = bodies["alder"]
    assert attempt.problem("alder", digest, announcement) == ""
    assert "not the one that the silo signed" in attempt.problem("alder", "0" * 64, announcement)
    assert "not the one that the silo signed" in attempt.problem("birch", digest, announcement)
    assert "has no part" in attempt.problem("mallory", digest, announcement)
    attempt.announce("alder", announcement)
    silos.body(digest).write_bytes(bytes(len(silos.load(digest))))
    with pytest.raises(ProtocolError, match="not the one that it signed for"):
        attempt.fold({"alder": digest}, silos.load)


def test_a_journal_in_which_a_bit_has_flipped_is_not_gone_on_with(tmp_path: Path) -> None:
    silos = Silos(tmp_path)
    attempt = begin(tmp_path, silos)
    while attempt.phase is not ServerPhase.MASKED:
        go_on(attempt, silos)
    attempt.close(forget=False)
    path = tmp_path / "journal"
    whole = path.read_bytes()
    assert resume(tmp_path, silos).phase is ServerPhase.MASKED
    for place in range(0, len(whole), len(whole) // 40):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(StorageError, match=r"is damaged in line \d+|has no beginning"):
            resume(tmp_path, silos)


def test_a_closed_journal_takes_nothing_more(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.add("message", b"one")
    journal.close(forget=False)
    journal.add("message", b"two")
    journal.sync()
    assert Journal(tmp_path / "journal").entries == [("message", b"one")]


def test_a_journal_on_a_full_disk_goes_on_behind_its_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.add("message", b"one")
    with files_of_at_most(path.stat().st_size + 20), pytest.raises(ResourceError, match="is full"):
        journal.add("message", b"two")
    journal.add("message", b"two")
    journal.close(forget=False)
    assert Journal(path).entries == [("message", b"one"), ("message", b"two")]


def test_what_is_said_again_in_a_later_phase_changes_nothing(tmp_path: Path) -> None:
    """After a reconnection a silo may hear a question twice, and answer it twice."""
    silos = Silos(tmp_path)
    attempt = begin(tmp_path, silos)
    while attempt.phase is not ServerPhase.CONSENT:
        go_on(attempt, silos)
    consents = {}
    for name, message in attempt.outgoing.items():
        consents[name] = silos.clients[name].handle(message)
        attempt.receive(consents[name])
    attempt.advance()
    entries = len(attempt.journal.path.read_bytes())
    for name, consent in consents.items():
        assert attempt.receive(consent) == name
        assert not attempt.began_anew(name, consent)
    assert len(attempt.journal.path.read_bytes()) == entries
    assert not attempt.server.aborted
    other = Silos(tmp_path / "other").adverts["alder"]
    with pytest.raises(ProtocolError):
        attempt.receive(other)
    assert attempt.began_anew("alder", other)
    assert not attempt.began_anew("alder", b"noise")
    while go_on(attempt, silos):
        pass
    assert attempt.decode().account["silos"] == 4
