"""What must hold when all is over, looked up in the database, the logs and the artifacts themselves."""

from __future__ import annotations

import re
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
from chaos_jobs import AUDITED, SAME, SUMMED, Jobs, records_of
from chaos_vectors import model_of_sum
from chaos_world import HUBS, World

from roundtable.administration import Administrator
from roundtable.core.errors import RoundtableError
from roundtable.core.evidence.audit_log import check_signed, read_log
from roundtable.core.evidence.cross_check import compare_logs
from roundtable.core.models import Model, open_model
from roundtable.core.privacy_table import NoPrivacy
from roundtable.engine.validation.round_plan import make_plan
from roundtable.engine.verification.bundle import LOG, Bundle
from roundtable.engine.verification.job_audit import JobAudit
from roundtable.server import load_server_config
from roundtable.server.storage.round_bundle import write_bundle
from roundtable.server.versions import versions


@dataclass
class Verdict:
    """What was counted, and in words everything that should not be."""

    jobs: Counter[str] = field(default_factory=Counter)
    rounds: int = 0
    closed: int = 0
    attempts_failed: int = 0
    takeovers: int = 0
    acknowledged: int = 0
    counted: int = 0
    superseded: int = 0
    charged: int = 0
    charged_in_vain: int = 0
    audited: int = 0
    summed: int = 0
    wrong: list[str] = field(default_factory=list)


class Judge:
    """Looks at everything once nothing runs any more but the coordinators."""

    def __init__(self, world: World, jobs: Jobs) -> None:
        self._world = world
        self._jobs = jobs
        self._ca = (world.folder / "ca" / "ca.crt").read_bytes()
        self._records = {each.job: records_of(world, each.job) for each in jobs.submitted}
        self._sizes = dict(world.ask("SELECT digest, size FROM artifacts"))
        self.verdict = Verdict()

    def judge(self) -> Verdict:
        """All of it."""
        for each in self._jobs.submitted:
            self._note(each.case, each.job, self._job(each.case, each.job))
        self._note("receipts", "", self._receipts())
        self._note("logs", "", self._logs())
        self.verdict.takeovers = int(self._world.ask("SELECT token FROM lease")[0][0])
        query = "SELECT count(*) FROM events WHERE kind = 'attempt_failed'"
        self.verdict.attempts_failed = int(self._world.ask(query)[0][0])
        return self.verdict

    def _note(self, case: str, job: str, found: Iterator[str]) -> None:
        try:
            self.verdict.wrong += [f"{case} {job}: {words}" for words in found]
        except RoundtableError as error:
            self.verdict.wrong.append(f"{case} {job}: {error}")

    def _job(self, case: str, job: str) -> Iterator[str]:
        [(status, reason)] = self._world.ask(f"SELECT status, reason FROM jobs WHERE id = '{job}'")
        self.verdict.jobs[f"{case}, {status}"] += 1
        records = self._records[job]
        self.verdict.rounds += len(records)
        self.verdict.closed += sum(bool(record["closed"]) for record in records)
        rounds = self._jobs.configs[case].rounds
        if status != "finished":
            yield f"is {status}: {reason}"
        elif [record["round"] for record in records] != list(range(1, rounds + 1)):
            yield f"its rounds are {[record['round'] for record in records]}"
        if case in SAME:
            yield from self._same(case, records)
        if case in SUMMED:
            yield from self._summed(case, records)
        if case in AUDITED:
            yield from self._audited(job)
        yield from self._ledger(case, job, records)
        yield from self._once(job, records)

    def _same(self, case: str, records: list[dict[str, Any]]) -> Iterator[str]:
        theirs = records_of(self._world, self._jobs.undisturbed[case])
        for mine, undisturbed in zip(records, theirs, strict=False):
            for key in ("contributors", "training", "closed"):
                if mine[key] != undisturbed[key]:
                    yield f"round {mine['round']}: {key} is {mine[key]}, undisturbed {undisturbed[key]}"
            # Whoever is away while a model is evaluated is left out of that.
            for name, metrics in mine["client_metrics"].items():
                if metrics != undisturbed["client_metrics"][name]:
                    yield f"round {mine['round']}: {name} measures {metrics}"
            if not self._alike(mine["model"], undisturbed["model"]):
                yield f"round {mine['round']}: the model is not the undisturbed run's"

    def _summed(self, case: str, records: list[dict[str, Any]]) -> Iterator[str]:
        job = self._jobs.configs[case]
        before = open_model(self._world.folder / f"{case}.safetensors")
        layout = before.layout
        slices = tuple(slice(spec.offset, spec.offset + spec.size) for spec in layout.averaged)
        plan = make_plan(job, len(self._world.silos), slices)
        names = self._world.silos
        for record in records:
            after = self._model(record["model"])
            if record["closed"]:
                if not torch.equal(after.vector, before.vector):
                    yield f"round {record['round']} was closed, and has another model"
                continue
            present = int(record["charge"]["silos"])
            sets = [record["contributors"]] if record["contributors"] else combinations(names, present)
            # In buffered rounds a group is a cohort, of silos that began with one model.
            cohort, ages = len(record["cohort"] if record["staleness"] else names), record["staleness"]
            age = max(ages.values(), default=0)
            made = [
                model_of_sum(job, plan, record["round"], cohort, sorted(some), before.vector, age)
                for some in sets
                if len(some) == present
            ]
            self.verdict.summed += 1
            if not any(torch.equal(after.vector, model) for model in made):
                yield f"round {record['round']} is not the sum of its {present} silos' vectors"
            before = after

    def _audited(self, job: str) -> Iterator[str]:
        folder = self._world.folder / "bundle"
        config = load_server_config(self._world.folder / f"{HUBS[0]}.toml")
        config = config.model_copy(update={"database": self._world.database})
        written = write_bundle(config, job, folder)
        try:
            if written.why_not or written.missing:
                yield f"the bundle lacks {written.missing} artifacts: {written.why_not}"
            with (folder / LOG).open(encoding="utf-8") as lines:
                log = read_log(lines, self._ca, "coordinator")
            check_signed(log)
            audit = JobAudit(Bundle(folder), log, self._ca, log.proven(time.time()), versions())
            for found in audit.verdicts(range(1, len(audit.rounds) + 1)):
                self.verdict.audited += 1
                if found.findings.verdict != "verified":
                    yield f"round {found.round}: {found.findings}"
        finally:
            shutil.rmtree(folder)

    def _ledger(self, case: str, job: str, records: list[dict[str, Any]]) -> Iterator[str]:
        """One charge for each round that released anything. An attempt that ended between its charge and what
        it would have released is charged in vain: that errs on the safe side, and is counted."""
        query = f"SELECT round, attempt FROM ledger WHERE job = '{job}' AND released AND silo = ''"
        charged = Counter(self._world.ask(query))
        self.verdict.charged += sum(charged.values())
        private = not isinstance(self._jobs.configs[case].privacy, NoPrivacy)
        told = Counter((record["round"], record["attempt"]) for record in records if private)
        self.verdict.charged_in_vain += (charged - told).total()
        if told - charged or max(charged.values(), default=0) > 1 or (charged and not private):
            yield f"charged {sorted(charged.elements())}, released {sorted(told.elements())}"

    def _once(self, job: str, records: list[dict[str, Any]]) -> Iterator[str]:
        """Each update in one model at most: by the step that asked for it, and by its record."""
        times: Counter[tuple[int, str]] = Counter()
        for record in records:
            if len(set(record["contributors"])) < len(record["contributors"]):
                yield f"round {record['round']} counts a silo twice"
            if not record["closed"]:
                ages = record["staleness"]
                times.update((record["round"] - ages.get(name, 0), name) for name in record["contributors"])
        yield from (f"{key} is in {count} models" for key, count in times.items() if count > 1)

    def _receipts(self) -> Iterator[str]:
        """What silos were told that it counts is in the database, and in its round's model."""
        rows = self._world.ask("SELECT job, round, attempt, client FROM updates WHERE receipt = 'accepted'")
        stored, cases = set(rows), {each.job: each.case for each in self._jobs.submitted}
        for silo in self._world.silos:
            for job, round, attempt in set(self._world.deliveries(silo)):
                if job not in cases:
                    continue
                self.verdict.acknowledged += 1
                if (job, round, attempt, silo) not in stored:
                    yield f"{silo} {job} {round}.{attempt}: acknowledged, and no row"
                elif cases[job] in SUMMED or cases[job] == "buffered":
                    continue
                elif self._record(job, round).get("attempt") != attempt:
                    self.verdict.superseded += 1
                elif silo in self._record(job, round)["contributors"]:
                    self.verdict.counted += 1
                elif self._record(job, round)["contributors"]:
                    yield f"{silo} {job} {round}.{attempt}: acknowledged, and not counted"

    def _record(self, job: str, round: int) -> Mapping[str, Any]:
        return next((record for record in self._records[job] if record["round"] == round), {})

    def _logs(self) -> Iterator[str]:
        """The audit logs hold together and tell one story; nobody met an error that nobody expects."""
        with self._operator() as operator:
            log = read_log(operator.audit(), self._ca, "coordinator")
        check_signed(log)
        for silo in self._world.silos:
            with (self._world.state_of(silo) / "audit.jsonl").open(encoding="utf-8") as lines:
                own = read_log(lines, self._ca, "agent")
            found = compare_logs(log, own, silo, self._ca)
            yield from (f"{silo}: {words}" for words in (*found.contradictions, *found.lost))
        for name in (*HUBS, *self._world.silos):
            yield from tracebacks(name, self._world.federation.log(name))

    def _alike(self, mine: str, undisturbed: str) -> bool:
        """Whether two models are the same; a private one names in its file what was spent until then."""
        return mine == undisturbed or torch.equal(self._model(mine).vector, self._model(undisturbed).vector)

    def _model(self, digest: str) -> Model:
        file = self._world.folder / "models" / digest
        if not file.exists():
            file.parent.mkdir(exist_ok=True)
            with self._operator() as operator:
                operator.get_artifact(digest, self._sizes[digest], file)
        return open_model(file)

    def _operator(self) -> Administrator:
        port = self._world.ports[self._world.active()]
        return Administrator(f"127.0.0.1:{port}", self._world.folder / "olga")


def tracebacks(name: str, log: str) -> Iterator[str]:
    """Each sort of unexpected error that a process has logged, with its last line."""
    sorts: dict[str, int] = defaultdict(int)
    for part in log.split("Traceback (most recent call last):\n")[1:]:
        lines = part.splitlines()
        last = next((line for line in lines if line and not line.startswith(" ")), "")
        sorts[re.sub(r"[0-9a-f]{8,}|\d+", "#", last)[:300]] += 1
    yield from (f"{name}: {count} times {last}" for last, count in sorts.items())
