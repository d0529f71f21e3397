"""Takes the silo's part in secure aggregation: checks its peers, masks its updates, survives restarts.

In memory are the attempts under way; in the state folder, sealed under a key that only the silo's
identity gives, is what an attempt needs after its vector is masked. A restart before that loses the
attempt's keys: the silo says so and waits for the next one, with fresh keys. What may leave at all is
decided by the silo's ledger of releases (release_ledger.py).
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from roundtable.client.agent.release_ledger import LedgerReleases, ReleaseLedger, refusing
from roundtable.client.agent.revocations import Revocations
from roundtable.client.durable_files import digest_of, replace_synced, write_file
from roundtable.client.failures import WorkFailed
from roundtable.client.policy.analysis_rules import asked_columns
from roundtable.client.policy.config import AgentConfig
from roundtable.client.policy.peers import KnownPeers
from roundtable.client.step_key import StepKey, about
from roundtable.client.trainer import TrainedUpdate
from roundtable.client.training.metrics import Metrics
from roundtable.client.training.silo_account import affordable, payment
from roundtable.core.config import JobConfig
from roundtable.core.errors import IdentityError, PrivacyError, ProtocolError, TransferError
from roundtable.core.failpoints import failpoint
from roundtable.core.identity.credentials import (
    SiloIdentity,
    load_credentials,
    load_silo_identity,
    verify_identity,
)
from roundtable.core.privacy_table import DistributedLevel, masking_of
from roundtable.privacy import SecureRound, why_not_masked
from roundtable.privacy.secagg import ClientPhase, Ed25519Signer, SecAggClient
from roundtable.privacy.secagg.framing import Kind, unseal

_log = logging.getLogger("roundtable.agent")
PHASE = "secure"
_MASKED = (ClientPhase.COMMITTED, ClientPhase.CONSENTED)
_NONCE_BYTES = 12
_DIGEST_BYTES = 32


def is_secure(job: JobConfig) -> bool:
    """Whether the job's updates travel masked."""
    return masking_of(job.privacy) is not None


def certificate_of(folder: Path) -> bytes:
    """The identity certificate that the agent announces; empty where it has none, as older credentials."""
    try:
        return load_silo_identity(folder).certificate
    except IdentityError as error:
        _log.info("this silo cannot take part in secure aggregation: %s", error)
        return b""


class MaskingAttempt:
    """One attempt of secure aggregation, as this silo takes part in it."""

    def __init__(self, client: SecAggClient, round: SecureRound | None) -> None:
        self.client = client
        self._round = round
        self.advert = client.advertise() if round is not None else b""
        self._settled = asyncio.Event()
        self._failure = ""

    def settle(self, failure: str = "") -> None:
        """Lets `ready` return: the vector can be masked now, or never, for the reason in `failure`."""
        self._failure = self._failure or failure
        self._settled.set()

    async def ready(self) -> None:
        """Waits until the vector can be masked; WorkFailed if it never can."""
        await self._settled.wait()
        if self._failure:
            raise WorkFailed("protocol_violation", f"secure aggregation was given up: {self._failure}")

    @property
    def bounds(self) -> Mapping[str, float]:
        """The metrics of the round's model that this round sums, with their bounds."""
        return self._round.bounds if self._round is not None else {}

    def mask(
        self, plain: Path, out: Path, trained: TrainedUpdate, metrics: Metrics, before: Metrics
    ) -> tuple[str, int]:
        """Masks the float32 update `trained`, in `plain`, into `out`; (BLAKE3, bytes). Blocks meanwhile.

        `metrics` are of its training, `before` of the model that the round began with. WorkFailed where
        earlier releases forbid it, TransferError where the update is not as it was trained: under a mask
        nobody else could see that.
        """
        assert self._round is not None, "a restored attempt has masked its vector already"
        _check_whole(plain, trained)
        update = np.memmap(plain, dtype="<f4", mode="r")
        total, count = metrics.get("loss", (math.nan, 0))
        source = self._round.encode(update, trained.examples, total / count if count else None, before)
        with refusing():
            chunks = self.client.masked_chunks(source)
        masked = write_file(out, chunks)
        _check_whole(plain, trained)
        return masked


def _check_whole(plain: Path, trained: TrainedUpdate) -> None:
    if digest_of(plain) != trained.digest:
        raise TransferError("the finished update was damaged on the silo's own disk before it was masked")


class SecureAttempts:
    """All attempts of secure aggregation that this silo takes part in."""

    def __init__(self, config: AgentConfig, name: str, ledger: ReleaseLedger) -> None:
        self._config = config
        self._name = name
        self._ledger = ledger
        self._folder = config.state / PHASE
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._attempts: dict[StepKey, MaskingAttempt] = {}
        self._revocations = Revocations(config.credentials, config.state)
        self._peers = KnownPeers(config.state)

    def check(self, job: JobConfig) -> None:
        """Raises WorkFailed for a job that asks for less than this silo's policy demands."""
        policy = self._config.policy
        if policy.secure_aggregation and not is_secure(job):
            raise WorkFailed(
                "refused",
                "this silo takes part only with secure aggregation ([policy] secure_aggregation = true); "
                "set privacy.secure_aggregation = true in the job",
            )

    def begin(
        self,
        step: StepKey,
        job: JobConfig,
        columns: int,
        model: str,
        identities: Iterable[bytes],
        subject: bytes,
    ) -> MaskingAttempt:
        """Takes part, with fresh keys, in an attempt to sum updates of `columns` values.

        `model` identifies what they are trained from (`model_values`). With silos that have been told to
        train by another `subject` (`subject_of`) no sum is made.

        Raises WorkFailed where the silo has begun it or a later one before, has no identity, or the peers
        that are announced are too few or not of its authority; BudgetExceeded where the silo's account does
        not hold the sum.
        """
        self._expect_news(step)
        if why := why_not_masked(job):
            raise WorkFailed("refused", why)
        own, directory = self._own(), self._directory(identities)
        least = self._config.policy.minimum_cohort
        if directory.get(self._name) != own.key.public_key().public_bytes_raw():
            raise WorkFailed(
                "refused", "the coordinator announces another identity for this silo than its own"
            )
        masking = masking_of(job.privacy)
        among = (masking.group_size if masking else None) or len(directory)
        if min(among, len(directory)) < least:
            raise WorkFailed(
                "refused",
                f"a sum is over {min(among, len(directory))} silos, and this one hides only among at least "
                f"{least} ([policy] minimum_cohort)",
            )
        try:
            round = SecureRound.of(job, columns, len(directory), step.round)
        except PrivacyError as error:
            raise WorkFailed("refused", str(error)) from error
        asked = asked_columns(self._config.policy.analyses, job)
        pay = self._payment(step, job, round)
        releases = LedgerReleases(self._ledger, model, pay, asked, noisy=job.releases_sums)
        with refusing():
            self._ledger.begin(step)
        self.forget_job(step.job)
        session = round.session(step.job, step.round, step.attempt, subject)
        signer = Ed25519Signer(own.key)
        least = max(least, round.fewest)
        client = SecAggClient(session, round.parameters, self._name, signer, directory, releases, least)
        attempt = self._attempts[_key(step)] = MaskingAttempt(client, round)
        return attempt

    def _expect_news(self, step: StepKey) -> None:
        """WorkFailed for an attempt that this silo has begun before, whatever became of it."""
        last = self._ledger.begun(step.job)
        if (step.round, step.attempt) == last:
            raise WorkFailed(
                "node_failure",
                "this silo has begun the attempt before and no longer has its keys (it was restarted, or its "
                "masked update was lost); no attempt is begun twice, and it takes part in the next",
            )
        if (step.round, step.attempt) < last:
            raise WorkFailed(
                "refused",
                f"this silo has begun round {last[0]}, attempt {last[1]} of the job before, and begins none "
                "at or below it; if the coordinator was restored from an old backup, submit a new job",
            )

    def _payment(self, step: StepKey, job: JobConfig, round: SecureRound) -> Callable[[], None] | None:
        """Charges the silo's own account for a sum with noise; None for one without.

        BudgetExceeded at once where the account does not hold it.
        """
        if round.noise is None or not isinstance(job.privacy, DistributedLevel):
            return None
        policy, folder = self._config.policy, self._config.state / "privacy"
        if not self._ledger.has_masked(step.job, step.round):
            affordable(folder, policy.epsilon, policy.delta)(job.privacy, round.noise.charge)
        pay = payment(folder, step.job, step.round, step.attempt, policy.epsilon, policy.delta)
        return partial(pay, job.privacy, round.noise.charge)

    def find(self, step: StepKey) -> MaskingAttempt | None:
        """The attempt of this step, in any phase; None for one that is over or lost."""
        return self._attempts.get(_key(step))

    def handle(self, step: StepKey, message: bytes) -> bytes | None:
        """The coordinator's next message; returns the answer, if it has one, once that can be repeated.

        A message that is refused ends the attempt here: the answer then says why.
        """
        attempt = self.find(step)
        if attempt is None:
            if (repeated := self._answered_before(step, message)) is not None:
                return repeated
            raise WorkFailed(
                "node_failure",
                "the silo was restarted before its update was masked: the keys of this attempt are gone",
            )
        client = attempt.client
        try:
            if client.phase in _MASKED and unseal(message).kind < Kind.ALIVE:
                return None  # Heard before the restart, and sent again after it.
            answer = client.handle(message)
        except ProtocolError as error:
            _log.error("%s: secure aggregation is given up: %s", step, error, extra=about(step))
            attempt.settle(str(error))
            self.forget(step)
            return client.abort(str(error))
        if client.phase is ClientPhase.READY:
            attempt.settle()
        elif client.phase is ClientPhase.CONSENTED:
            self.keep(step)
        elif client.phase is ClientPhase.DONE:
            assert answer is not None
            self._shares_are_out(_key(step), message, answer)
        return answer

    def keep(self, step: StepKey) -> None:
        """Seals on disk what a restart needs to go on with the attempt."""
        attempt = self.find(step)
        if attempt is not None:
            failpoint("masked", step.round, step.phase)
            key, nonce = _key(step), os.urandom(_NONCE_BYTES)
            sealed = self._cipher().encrypt(nonce, attempt.client.snapshot(), key.slug.encode())
            replace_synced(self._file(key), [nonce, sealed])
            failpoint("keys_kept", step.round, step.phase)

    def _shares_are_out(self, key: StepKey, message: bytes, answer: bytes) -> None:
        """Keeps the last answer, which may be lost on its way and asked for again; erases all else."""
        replace_synced(self._file(key, "done"), [blake3(message).digest(), answer])
        self._file(key).unlink(missing_ok=True)
        _log.info("%s: the silo's shares for the sum of the round are given out", key, extra=about(key))

    def _answered_before(self, step: StepKey, message: bytes) -> bytes | None:
        path = self._file(_key(step), "done")
        if not path.exists():
            return None
        kept = path.read_bytes()
        return kept[_DIGEST_BYTES:] if kept[:_DIGEST_BYTES] == blake3(message).digest() else None

    def recover(self) -> None:
        """Restores the attempts of an earlier process that had masked their vector."""
        for path in list(self._folder.glob("*.sealed")):
            try:
                key = _parsed(path.stem)
                raw = path.read_bytes()
                opened = self._cipher().decrypt(raw[:_NONCE_BYTES], raw[_NONCE_BYTES:], key.slug.encode())
                signer = Ed25519Signer(self._own().key)
                client = SecAggClient.restore(opened, signer, LedgerReleases(self._ledger))
            except (InvalidTag, ValueError, ProtocolError, WorkFailed) as error:
                _log.warning("an attempt of secure aggregation cannot be taken up: %s", error or type(error))
                path.unlink()
                continue
            self._attempts[key] = MaskingAttempt(client, None)

    def forget(self, step: StepKey) -> None:
        """Erases an attempt that is over."""
        self._attempts.pop(_key(step), None)
        self._file(_key(step)).unlink(missing_ok=True)

    def forget_job(self, job: str) -> None:
        """Erases all attempts of the job."""
        for key in [key for key in self._attempts if key.job == job]:
            self.forget(key)
        for path in list(self._folder.iterdir()):
            if path.stem.rsplit(".", 3)[0] == job:
                path.unlink()

    def _own(self) -> SiloIdentity:
        try:
            return load_silo_identity(self._config.credentials)
        except IdentityError as error:
            raise WorkFailed("refused", f"this silo has no identity to sign with: {error}") from error

    def _directory(self, identities: Iterable[bytes]) -> dict[str, bytes]:
        """Names and keys of the peers, each certified by this silo's own authority and no other."""
        authority = load_credentials(self._config.credentials).ca
        from_root = self._config.policy.identities == "root"
        directory: dict[str, tuple[bytes, bytes]] = {}
        try:
            for certificate in identities:
                name, key = verify_identity(certificate, authority, from_root=from_root)
                self._revocations.check(certificate, f"the silo {name!r}")
                if directory.setdefault(name, (key, certificate))[0] != key:
                    raise WorkFailed("refused", f"the coordinator announces two identities for {name}")
            if not from_root:
                self._peers.meet(directory, authority)
        except IdentityError as error:
            raise WorkFailed("refused", f"a peer cannot be trusted: {error}") from error
        return {name: key for name, (key, _) in directory.items()}

    def _cipher(self) -> AESGCM:
        secret = self._own().key.private_bytes_raw()
        kdf = HKDF(algorithm=hashes.SHA256(), length=32, salt=None, info=b"roundtable sealed attempt")
        return AESGCM(kdf.derive(secret))

    def _file(self, key: StepKey, kind: str = "sealed") -> Path:
        return self._folder / f"{key.slug}.{kind}"


def _key(step: StepKey) -> StepKey:
    """The step key of the attempt, whichever phase the given one is of."""
    return step._replace(phase=PHASE)


def _parsed(slug: str) -> StepKey:
    job, round, attempt, phase = slug.rsplit(".", 3)
    return StepKey(job, int(round), int(attempt), phase)
