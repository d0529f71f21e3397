"""The silo's durable ledger of releases: what has left it, from which model, and among whom it was summed.

Each line of `releases.jsonl` is on the disk before what it tells of leaves. A release is known by what it
was bound to (the model's values, the cohort's names and keys, the bytes), not by numbers that a coordinator
chooses. Sums without noise over one model follow three rules, whose proof is in docs/secure-aggregation.md:

1. within a job attempts come in the order of their numbers, each once;
2. after helping to unmask a sum over the silos S, the silo masks from that model among the same cohort or
   among S only, and helps to unmask nothing but S;
3. a model that the silo masked from for one job is used for another among the same cohort only.

Every analysis begins from the same model, so that of each job counts as another one (`LedgerReleases`);
between their jobs the columns that they use are compared (asked_cohorts.py).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from roundtable.client.durable_files import append_synced
from roundtable.client.failures import WorkFailed
from roundtable.client.policy.analysis_rules import AskedColumns
from roundtable.client.policy.asked_cohorts import AskedCohorts
from roundtable.client.step_key import StepKey
from roundtable.core.errors import ProtocolError
from roundtable.core.layout import Layout
from roundtable.core.models import open_model
from roundtable.privacy.secagg.custody import Cohort
from roundtable.privacy.secagg.releases import members_digest, other_attempt

NAME = "releases.jsonl"
_REMEDY = (
    "ask the same silos again, let the model change first, or add noise "
    '(privacy.level = "distributed"); another job starts from another model, for example by another seed'
)


@dataclass(frozen=True)
class Masked:
    """An attempt whose masked vector may have left; a `noisy` sum is charged, no rule on models binds it."""

    round: int
    attempt: int
    model: str
    cohort: str
    noisy: bool
    asked: AskedColumns | None = None


@dataclass
class _Job:
    """What one job was given."""

    begun: tuple[int, int] = (0, 0)
    masked: dict[tuple[int, int], Masked] = field(default_factory=dict)
    unmasked: dict[int, str] = field(default_factory=dict)
    updates: set[str] = field(default_factory=set)
    evaluations: dict[tuple[int, int], str] = field(default_factory=dict)

    @property
    def released(self) -> int:
        """Updates that left, each counted once however often it was sent or masked for the same sum."""
        return len(self.updates) + len({(each.round, each.model) for each in self.masked.values()})


@dataclass
class _Model:
    """The sums without noise that were made from one model."""

    cohorts: dict[str, set[str]] = field(default_factory=dict)
    """Cohorts that were masked among, by job."""
    unmasked: tuple[str, str, tuple[str, ...]] | None = None
    """The cohort and the survivors of the one sum that the silo helped to unmask, and their names."""


class ReleaseLedger:
    """One for the life of an agent. `most` is `[policy] rounds`: updates, and evaluations, of each job."""

    def __init__(self, path: Path, most: int | None = None) -> None:
        self._path = path
        self._most = most
        self._lock = threading.RLock()
        self._jobs: dict[str, _Job] = {}
        self._models: dict[str, _Model] = {}
        self._asked = AskedCohorts()
        self._load()

    def begun(self, job: str) -> tuple[int, int]:
        """Round and attempt of the last secure aggregation that the silo began for this job."""
        return self._jobs.get(job, _Job()).begun

    def has_masked(self, job: str, round: int) -> bool:
        """Whether an update of this round may have left masked: another attempt may cost nothing more."""
        return any(each.round == round for each in self._jobs.get(job, _Job()).masked.values())

    def has_unmasked(self, job: str, round: int) -> bool:
        """Whether the silo has helped to unmask a sum of this round, or was about to."""
        return round in self._jobs.get(job, _Job()).unmasked

    def begin(self, step: StepKey) -> None:
        """The silo is about to advertise keys; ProtocolError for a number at or below the last."""
        with self._lock:
            last = self.begun(step.job)
            if (step.round, step.attempt) <= last:
                raise ProtocolError(
                    f"round {step.round}, attempt {step.attempt} is not after round {last[0]}, attempt "
                    f"{last[1]}, which this silo has begun already: no attempt is begun twice"
                )
            self._add("begun", step.job, round=step.round, attempt=step.attempt)

    def mask(
        self,
        cohort: Cohort,
        model: str,
        *,
        noisy: bool = False,
        pay: Callable[[], None] | None = None,
        asked: AskedColumns | None = None,
    ) -> None:
        """A masked vector is about to leave. ProtocolError where the rules forbid it, or what `pay` raises.

        `pay` is called unless a sum of this round, model and cohort is paid for: at most one is unmasked.
        `asked` is what an analysis uses.
        """
        session = cohort.session
        attempt = Masked(session.round, session.attempt, model, members_digest(cohort), noisy, asked)
        with self._lock:
            self._expect_newest(cohort)
            job = self._jobs[session.job]
            alike = [each for each in job.masked.values() if _sum_of(each) == _sum_of(attempt)]
            if attempt in alike:
                return
            if not noisy:
                self._check_model(session.job, attempt)
            if asked is not None:
                self._asked.check(asked, session.job, cohort.names)
            if not any((each.round, each.model) == (attempt.round, model) for each in job.masked.values()):
                self._check_count(job.released, "updates")
            if pay is not None and not alike:
                pay()
            self._add(
                "masked",
                session.job,
                round=session.round,
                attempt=session.attempt,
                model=model,
                cohort=attempt.cohort,
                silos=list(cohort.names),
                noisy=noisy,
                **({"asked": asdict(asked)} if asked is not None else {}),
            )

    def unmask(self, cohort: Cohort, survivors: Iterable[int]) -> None:
        """The silo is about to help to unmask a sum: one attempt of a round, one sum from a model."""
        session, chosen = cohort.session, sorted(survivors)
        with self._lock:
            self._expect_newest(cohort)
            job = self._jobs[session.job]
            masked = job.masked.get((session.round, session.attempt))
            if masked is None or masked.cohort != members_digest(cohort):
                raise ProtocolError("this silo has masked nothing for the cohort that is to be unmasked")
            total = members_digest(cohort, chosen)
            before = job.unmasked.get(session.round)
            if before == cohort.binding.hex() + total:
                return
            if before is not None:
                raise ProtocolError(other_attempt(session.round))
            model = self._models.get(masked.model, _Model())
            if not masked.noisy and model.unmasked is not None and model.unmasked[1] != total:
                raise ProtocolError(_another_sum(model.unmasked[2]))
            if masked.asked is not None:
                self._asked.check(masked.asked, session.job, (cohort.names[index] for index in chosen))
            self._add(
                "unmasked",
                session.job,
                round=session.round,
                attempt=session.attempt,
                binding=cohort.binding.hex(),
                survivors=total,
                silos=[cohort.names[index] for index in chosen],
            )

    def update(self, step: StepKey, model: str, digest: str) -> None:
        """An update in the clear is about to leave; the same bytes again are no new release."""
        with self._lock:
            job = self._jobs.get(step.job, _Job())
            if digest not in job.updates:
                self._check_count(job.released, "updates")
                where = {"round": step.round, "attempt": step.attempt}
                self._add("update", step.job, **where, model=model, digest=digest)

    def evaluation(self, step: StepKey, model: str) -> None:
        """Metrics are about to leave: of one model for each attempt, and of so many models for each job."""
        with self._lock:
            job = self._jobs.get(step.job, _Job())
            before = job.evaluations.get((step.round, step.attempt))
            if before == model:
                return
            if before is not None:
                raise ProtocolError(
                    f"another model was evaluated for round {step.round}, attempt {step.attempt}: an attempt "
                    "makes one model"
                )
            if model not in job.evaluations.values():
                self._check_count(len(set(job.evaluations.values())), "evaluations")
            self._add("evaluation", step.job, round=step.round, attempt=step.attempt, model=model)

    def _expect_newest(self, cohort: Cohort) -> None:
        session = cohort.session
        if self.begun(session.job) != (session.round, session.attempt):
            raise ProtocolError(
                f"round {session.round}, attempt {session.attempt} is not the one that this silo began last "
                f"for job {session.job}"
            )

    def _check_model(self, job: str, attempt: Masked) -> None:
        model = self._models.get(attempt.model, _Model())
        if model.unmasked is not None and attempt.cohort not in model.unmasked[:2]:
            raise ProtocolError(_another_sum(model.unmasked[2]))
        others = {cohort for other, cohorts in model.cohorts.items() if other != job for cohort in cohorts}
        if others - {attempt.cohort}:
            raise ProtocolError(
                "this silo masked an update from the same model for another job, among other silos: two sums "
                f"that differ by few silos give those away; {_REMEDY}"
            )

    def _check_count(self, count: int, what: str) -> None:
        if self._most is not None and count >= self._most:
            raise ProtocolError(
                f"{count} {what} of this job have left this silo, which allows {self._most} ([policy] rounds)"
            )

    def _add(self, kind: str, job: str, **values: Any) -> None:
        entry = {"kind": kind, "job": job, **values}
        append_synced(self._path, json.dumps(entry, separators=(",", ":")).encode() + b"\n")
        self._take(entry)

    def _load(self) -> None:
        try:
            lines = self._path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return
        # What follows the last end of a line was cut off by a crash: nothing had left on its account.
        whole = lines[:-1]
        try:
            for line in whole:
                self._take(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ProtocolError(
                f"{self._path} is damaged: without it two sums could give this silo's update away; restore "
                "its newest copy from a backup"
            ) from error
        if lines[-1]:
            with self._path.open("r+b") as file:
                file.truncate(sum(len(line) + 1 for line in whole))

    def _take(self, entry: dict[str, Any]) -> None:
        job = self._jobs.setdefault(str(entry["job"]), _Job())
        at = int(entry["round"]), int(entry["attempt"])
        match entry["kind"]:
            case "begun":
                job.begun = max(job.begun, at)
            case "masked":
                asked = _asked_of(entry.get("asked"))
                masked = Masked(*at, str(entry["model"]), str(entry["cohort"]), bool(entry["noisy"]), asked)
                job.masked[at] = masked
                if asked is not None:
                    self._asked.add(asked, str(entry["job"]), map(str, entry["silos"]))
                if not masked.noisy:
                    model = self._models.setdefault(masked.model, _Model())
                    model.cohorts.setdefault(str(entry["job"]), set()).add(masked.cohort)
            case "unmasked":
                survivors, masked = str(entry["survivors"]), job.masked[at]
                job.unmasked[at[0]] = str(entry["binding"]) + survivors
                if masked.asked is not None:
                    self._asked.add(masked.asked, str(entry["job"]), map(str, entry["silos"]))
                if not masked.noisy:
                    names, model = tuple(str(name) for name in entry["silos"]), self._models[masked.model]
                    model.unmasked = model.unmasked or (masked.cohort, survivors, names)
            case "update":
                job.updates.add(str(entry["digest"]))
            case "evaluation":
                job.evaluations[at] = str(entry["model"])
            case kind:
                raise ValueError(f"{kind!r} is not a kind of release")


class LedgerReleases:
    """`Releases` over the silo's ledger, for one attempt.

    `model` identifies the values that the update was trained from, and `pay` charges the silo's account for
    a sum with noise; `asked` is what an analysis uses. All are None for an attempt that is taken up after its
    vector was masked. `noisy`: the vector has noise of its own, and was paid for as that was drawn.
    """

    def __init__(
        self,
        ledger: ReleaseLedger,
        model: str | None = None,
        pay: Callable[[], None] | None = None,
        asked: AskedColumns | None = None,
        noisy: bool = False,
    ) -> None:
        self._ledger = ledger
        self._noisy = noisy or pay is not None
        self._model = model
        self._pay = pay
        self._asked = asked

    def mask(self, cohort: Cohort) -> None:
        """See `Releases`."""
        assert self._model is not None, "a restored attempt has masked its vector already"
        model = self._model if self._asked is None else f"{self._model} of {cohort.session.job}"
        self._ledger.mask(cohort, model, noisy=self._noisy, pay=self._pay, asked=self._asked)

    def unmask(self, cohort: Cohort, survivors: Iterable[int]) -> None:
        """See `Releases`."""
        self._ledger.unmask(cohort, survivors)


@contextmanager
def refusing() -> Iterator[None]:
    """What the ledger of releases refuses is a refusal of the step, in the ledger's words."""
    try:
        yield
    except ProtocolError as error:
        raise WorkFailed("refused", str(error)) from error


def model_values(model: Path) -> tuple[Layout, str]:
    """The layout of an update of this model, and the digest of the model's values: a header with other
    notes, or other names of tensors, makes no other model. Reads the whole file."""
    opened = open_model(model)
    vector = opened.vector
    return opened.layout.sent, blake3(vector.detach().contiguous().view(torch.uint8).numpy().data).hexdigest()


def _asked_of(entry: Any) -> AskedColumns | None:
    if entry is None:
        return None
    return AskedColumns(str(entry["table"]), tuple(map(str, entry["columns"])), int(entry["apart"]))


def _sum_of(masked: Masked) -> tuple[int, str, str]:
    """Of what agrees in these at most one sum is ever unmasked, however many attempts there are."""
    return masked.round, masked.model, masked.cohort


def _another_sum(silos: tuple[str, ...]) -> str:
    who = ", ".join(silos[:8]) + (", …" if len(silos) > 8 else "")
    return (
        f"this silo has helped to unmask a sum from the same model over {len(silos)} silos ({who}); the "
        f"difference of that and one over others tells of those in which they differ; {_REMEDY}"
    )
