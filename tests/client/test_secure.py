"""A silo's part in secure aggregation: whom it trusts, what it refuses, what it remembers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bit_rot import flip
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from roundtable.client.agent.release_ledger import NAME, ReleaseLedger
from roundtable.client.agent.secure_attempts import SecureAttempts, certificate_of
from roundtable.client.failures import WorkFailed
from roundtable.client.policy.config import AgentConfig, PolicyTable, load_agent_config
from roundtable.client.policy.peers import KnownPeers
from roundtable.client.step_key import StepKey
from roundtable.client.trainer import TrainedUpdate, write_update
from roundtable.core import parse_job
from roundtable.core.config import JobConfig
from roundtable.core.errors import BudgetExceeded, ConfigError, TransferError
from roundtable.core.identity.credentials import Authority, create_ca, issue
from roundtable.privacy import SecureMean, SecureRound
from roundtable.privacy.secagg import ClientPhase, SecAggServer, VectorSource

NAMES = ("alder", "birch", "cedar")
COLUMNS = 40
MODEL = "0" * 64
SUBJECT = bytes(32)
STEP = StepKey("job-1", 1, 1, "train")


def job(text: str = "clip_norm = 1.0") -> JobConfig:
    return parse_job(f'task = "t"\n[privacy]\nlevel = "none"\nsecure_aggregation = true\n{text}')


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    create_ca(tmp_path / "ca")
    for name in NAMES:
        issue(tmp_path / "ca", name, "agent", tmp_path / name)
    return tmp_path


def config(folder: Path, name: str, least: int = 3, **policy: float) -> AgentConfig:
    return AgentConfig(
        coordinator="127.0.0.1:1",
        credentials=folder / name,
        state=folder / "state" / name,
        policy=PolicyTable(minimum_cohort=least, **policy),
    )


def taking_part(config: AgentConfig, name: str = "alder") -> SecureAttempts:
    """As a process that has just started."""
    return SecureAttempts(config, name, ReleaseLedger(config.state / NAME))


def silo(folder: Path, name: str, least: int = 3, **policy: float) -> SecureAttempts:
    return taking_part(config(folder, name, least, **policy), name)


def certificates(folder: Path, *names: str) -> list[bytes]:
    return [certificate_of(folder / name) for name in names or NAMES]


class Coordinator:
    """An honest one, around the protocol's own state machine."""

    def __init__(
        self,
        folder: Path,
        attempt: int = 1,
        names: tuple[str, ...] = NAMES,
        wanted: JobConfig | None = None,
        name: str = "job-1",
        **policy: float,
    ) -> None:
        self.silos = {each: silo(folder, each, **policy) for each in names}
        self.folder, self.step = folder, StepKey(name, 1, attempt, "train")
        wanted = wanted or job()
        self.round = SecureRound.of(wanted, COLUMNS, len(names), 1)
        shown = certificates(folder, *names)
        begun = {
            n: own.begin(self.step, wanted, COLUMNS, MODEL, shown, SUBJECT) for n, own in self.silos.items()
        }
        directory = {name: attempt.client._directory[name] for name, attempt in begun.items()}
        session = self.round.session(name, 1, attempt, SUBJECT)
        self.server = SecAggServer(session, self.round.parameters, directory)
        for attempt_ in begun.values():
            self.server.receive(attempt_.advert)

    def exchange(self) -> dict[str, bytes | None]:
        """Closes a phase and hands out what follows; the answers."""
        messages = self.server.advance()
        return {name: self.silos[name].handle(self.step, message) for name, message in messages.items()}

    def take(self, answers: dict[str, bytes | None]) -> None:
        for answer in answers.values():
            assert answer is not None
            self.server.receive(answer)

    def unmasked(self) -> SecureMean:
        """The whole attempt."""
        self.masked()
        for _ in range(2):
            self.take(self.exchange())
        self.server.advance()
        mean = self.round.decode(self.server.total, len(self.silos), len(self.silos))
        assert isinstance(mean, SecureMean)
        return mean

    def masked(self) -> None:
        """Up to the masked vectors, which are taken."""
        self.take(self.exchange())
        self.exchange()
        for name, own in self.silos.items():
            plain, trained = self.trained(name)
            out = self.folder / f"{name}.update"
            attempt = own.find(self.step)
            assert attempt is not None
            attempt.mask(plain, out, trained, {"loss": (5.0, 5)}, {})
            own.keep(self.step)
            self.server.fold(attempt.client.masked(), out.read_bytes())

    def trained(self, name: str) -> tuple[Path, TrainedUpdate]:
        """A silo's update, as its training leaves it."""
        plain = self.folder / f"{name}.plain"
        digest, size = write_update(plain, torch.full((COLUMNS,), 0.1), "float32")
        return plain, TrainedUpdate(digest, size, 5, {})


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_an_update_that_rots_before_it_is_masked_is_not_sent(
    folder: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    coordinator = Coordinator(folder)
    coordinator.take(coordinator.exchange())
    coordinator.exchange()
    plain, trained = coordinator.trained("alder")
    attempt = coordinator.silos["alder"].find(coordinator.step)
    assert attempt is not None
    if when == "before":
        flip(plain, 2)
    else:
        encode = SecureRound.encode

        def late(*values: Any) -> VectorSource:
            flip(plain, 2)
            return encode(*values)

        monkeypatch.setattr(SecureRound, "encode", late)
    with pytest.raises(TransferError, match="damaged on the silo's own disk before it was masked"):
        attempt.mask(plain, folder / "out", trained, {}, {})
    # What is found before it is masked costs the silo nothing of its account.
    assert (attempt.client.phase is ClientPhase.READY) == (when == "before")


def test_a_substituted_identity_is_refused(folder: Path) -> None:
    create_ca(folder / "evil")
    issue(folder / "evil", "cedar", "agent", folder / "false")
    shown = [*certificates(folder, "alder", "birch"), certificate_of(folder / "false")]
    with pytest.raises(WorkFailed, match=r"a peer cannot be trusted.*not issued by the authority"):
        silo(folder, "alder").begin(STEP, job(), COLUMNS, MODEL, shown, SUBJECT)


def test_a_known_silo_keeps_the_key_that_it_showed_first(folder: Path) -> None:
    """Whoever has the issuing key makes a second cedar; a person, or the root, says which one is true."""
    silo(folder, "alder").begin(
        STEP._replace(attempt=1), job(), COLUMNS, MODEL, certificates(folder), SUBJECT
    )

    def online() -> bytes:
        key = Ed25519PrivateKey.generate().public_key()
        return Authority.issuing(folder / "ca").certify(key, "cedar", "agent")

    others, false = certificates(folder, "alder", "birch"), online()
    with pytest.raises(WorkFailed, match=r"'cedar' presents a new key .*`roundtable client forget cedar`"):
        # Also after a restart.
        silo(folder, "alder").begin(
            STEP._replace(attempt=2), job(), COLUMNS, MODEL, [*others, false], SUBJECT
        )
    silo(folder, "alder").begin(
        STEP._replace(attempt=3), job(), COLUMNS, MODEL, certificates(folder), SUBJECT
    )
    KnownPeers(config(folder, "alder").state).forget("cedar")
    silo(folder, "alder").begin(STEP._replace(attempt=4), job(), COLUMNS, MODEL, [*others, false], SUBJECT)
    # A certificate that was renewed for the same key is no other silo; one of the root's own needs no person.
    public = x509.load_pem_x509_certificates(false)[0].public_key()
    assert isinstance(public, Ed25519PublicKey)
    renewed = Authority.issuing(folder / "ca").certify(public, "cedar", "agent")
    silo(folder, "alder").begin(STEP._replace(attempt=5), job(), COLUMNS, MODEL, [*others, renewed], SUBJECT)
    silo(folder, "alder").begin(
        STEP._replace(attempt=6), job(), COLUMNS, MODEL, certificates(folder), SUBJECT
    )
    with pytest.raises(WorkFailed, match="presents a new key"):
        silo(folder, "alder").begin(
            STEP._replace(attempt=7), job(), COLUMNS, MODEL, [*others, false], SUBJECT
        )
    with pytest.raises(ConfigError, match="'oak' is not known here; this silo has met alder, birch, cedar"):
        KnownPeers(config(folder, "alder").state).forget("oak")


@pytest.mark.parametrize("text", ["nonsense", "[]", '{"cedar": 3}', '{"cedar": {"key": 1}}', "[" * 100_000])
def test_a_damaged_memory_of_peers_is_no_empty_one(folder: Path, text: str) -> None:
    damaged = silo(folder, "alder")
    (config(folder, "alder").state / "peers.json").write_text(text)
    with pytest.raises(WorkFailed, match=r"peers\.json is damaged"):
        damaged.begin(STEP, job(), COLUMNS, MODEL, certificates(folder), SUBJECT)


def test_two_identities_of_one_silo_are_refused(folder: Path) -> None:
    issue(folder / "ca", "cedar", "agent", folder / "again")
    shown = [*certificates(folder), certificate_of(folder / "again")]
    with pytest.raises(WorkFailed, match="announces two identities for cedar"):
        silo(folder, "alder").begin(STEP, job(), COLUMNS, MODEL, shown, SUBJECT)


def test_a_silo_hides_only_among_as_many_as_it_demands(folder: Path) -> None:
    with pytest.raises(WorkFailed, match=r"a sum is over 3 silos.*at least 5 \(\[policy\] minimum_cohort\)"):
        silo(folder, "alder", least=5).begin(STEP, job(), COLUMNS, MODEL, certificates(folder), SUBJECT)
    with pytest.raises(WorkFailed, match="another identity for this silo"):
        silo(folder, "alder").begin(
            STEP, job(), COLUMNS, MODEL, certificates(folder, "birch", "cedar"), SUBJECT
        )


def test_a_job_without_secure_aggregation_is_refused_where_it_is_demanded(folder: Path) -> None:
    demanding = replace(config(folder, "alder"), policy=PolicyTable(secure_aggregation=True))
    taking_part(demanding).check(job())
    with pytest.raises(WorkFailed, match="only with secure aggregation") as refused:
        taking_part(demanding).check(parse_job('task = "t"'))
    assert refused.value.kind == "refused"


def test_the_policy_is_read_from_agent_toml(tmp_path: Path) -> None:
    path = tmp_path / "agent.toml"
    path.write_text('coordinator = "c:1"\n[policy]\nsecure_aggregation = true\nminimum_cohort = 7\n')
    assert load_agent_config(path).policy == PolicyTable(secure_aggregation=True, minimum_cohort=7)


def test_restarts_after_masking_and_after_giving_out_shares_lose_nothing(folder: Path) -> None:
    coordinator = Coordinator(folder)
    coordinator.masked()
    sealed = folder / "state" / "alder" / "secure" / "job-1.1.1.secure.sealed"
    assert b"job-1" not in sealed.read_bytes()
    coordinator.silos["alder"] = silo(folder, "alder")
    coordinator.silos["alder"].recover()
    coordinator.take(coordinator.exchange())
    evidence = coordinator.server.advance()
    coordinator.silos["alder"] = silo(folder, "alder")
    coordinator.silos["alder"].recover()
    answers = {n: coordinator.silos[n].handle(coordinator.step, evidence[n]) for n in NAMES}
    assert not sealed.exists()
    restarted = silo(folder, "alder")
    restarted.recover()
    assert restarted.handle(coordinator.step, evidence["alder"]) == answers["alder"]
    coordinator.take(answers)
    coordinator.server.advance()
    mean = coordinator.round.decode(coordinator.server.total, 3, 3)
    assert mean.vector.numpy() == pytest.approx(0.1, abs=1e-4)


def test_another_attempt_of_an_unmasked_round_gets_no_shares(folder: Path) -> None:
    first = Coordinator(folder)
    first.masked()
    first.take(first.exchange())
    first.take(first.exchange())
    second = Coordinator(folder, attempt=2)
    second.masked()
    second.take(second.exchange())
    for message in second.exchange().values():
        assert message is not None
        second.server.receive(message)
    assert set(second.server.aborted) == set(NAMES)
    assert "was unmasked already" in second.server.aborted["alder"]


def test_before_masking_a_restart_loses_the_keys(folder: Path) -> None:
    coordinator = Coordinator(folder)
    message = coordinator.server.advance()["alder"]
    restarted = silo(folder, "alder")
    restarted.recover()
    with pytest.raises(WorkFailed, match="keys of this attempt are gone"):
        restarted.handle(coordinator.step, message)


def test_a_sealed_attempt_opens_only_under_the_silos_own_identity(folder: Path) -> None:
    Coordinator(folder).masked()
    stolen = folder / "state" / "birch" / "secure"
    source = folder / "state" / "alder" / "secure" / "job-1.1.1.secure.sealed"
    (stolen / source.name).write_bytes(source.read_bytes())
    thief = silo(folder, "birch")
    thief.recover()
    assert thief.find(STEP) is None


async def test_a_refused_message_ends_the_attempt_and_says_why(folder: Path) -> None:
    coordinator = Coordinator(folder)
    silo = coordinator.silos["alder"]
    attempt = silo.find(coordinator.step)
    assert attempt is not None
    answer = silo.handle(coordinator.step, b"RTSA nonsense" * 10)
    assert answer is not None
    coordinator.server.receive(answer)
    assert "alder" in coordinator.server.aborted
    with pytest.raises(WorkFailed, match="secure aggregation was given up"):
        await attempt.ready()


def test_a_silo_that_trusts_the_root_alone_refuses_peers_of_the_issuing_authority(folder: Path) -> None:
    made = Authority.issuing(folder / "ca").certify(
        Ed25519PrivateKey.generate().public_key(), "cedar", "agent"
    )
    shown = [*certificates(folder, "alder", "birch"), made]
    lax = config(folder, "alder")
    strict = replace(lax, state=folder / "strict", policy=PolicyTable(identities="root"))
    taking_part(lax).begin(STEP, job(), COLUMNS, MODEL, shown, SUBJECT)
    with pytest.raises(WorkFailed, match="not from the root"):
        taking_part(strict).begin(STEP, job(), COLUMNS, MODEL, shown, SUBJECT)
    taking_part(strict).begin(STEP, job(), COLUMNS, MODEL, certificates(folder), SUBJECT)


def test_two_sums_that_differ_by_one_silo_are_not_both_made(folder: Path) -> None:
    """The difference of the sums over four silos and over three of them would be the fourth's update."""
    issue(folder / "ca", "dogwood", "agent", folder / "dogwood")
    four = (*NAMES, "dogwood")
    Coordinator(folder, names=four).unmasked()
    with pytest.raises(WorkFailed, match="has begun the attempt before"):
        Coordinator(folder)
    for changed in ({"attempt": 2}, {"name": "job-2"}):
        with pytest.raises(
            WorkFailed, match=r"sum from the same model over 4 silos \(alder, birch, cedar"
        ) as no:
            Coordinator(folder, **changed).masked()
        assert no.value.kind == "refused"
    again = Coordinator(folder, names=four, name="job-3").unmasked()
    assert again.vector.numpy() == pytest.approx(0.1, abs=1e-4)


def test_every_sum_with_noise_is_charged_to_the_silos_own_account(folder: Path) -> None:
    """Repeated, sums of one update would average the noise away: the account ends that, job or no job."""
    noisy = parse_job(
        'task = "t"\n[privacy]\nlevel = "distributed"\nclip_norm = 1.0\nnoise_multiplier = 2.0\n'
        'delta = 1e-3\n[aggregation]\nweighting = "uniform"\n[cohort]\nsize = 3'
    )
    sums = 0
    with pytest.raises(BudgetExceeded):  # noqa: PT012 - each sum before the last is made
        for sums in range(100):
            Coordinator(folder, wanted=noisy, name=f"job-{sums}", epsilon=6.0).unmasked()
    account = json.loads((config(folder, "alder").state / "privacy" / "client.json").read_text())
    assert 1 <= sums < 10
    assert len(account["entries"]) == sums
