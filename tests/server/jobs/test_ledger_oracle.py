"""What the ledger says of a job against what was really drawn and really shown, whatever happens in between.

The driver and the account are the coordinator's own, over a real database. Models are made by the test: each
time that one is asked for it has other noise, hence another name. Silos come, go, fail and send; answers of
the aggregation come twice and late; operators pause, resume and cancel; the process dies at each failpoint of
a transition. What counts as released is read off the actions that were performed and off committed rows.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
from collections import defaultdict
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from roundtable.core import Layout, parse_job
from roundtable.core.errors import PrivacyError, SiteFailure
from roundtable.core.observability.released import public
from roundtable.engine import RoundEngine, make_plan, record_from_plain
from roundtable.engine import messages as m
from roundtable.engine.validation.round_noise import CorrelatedRounds
from roundtable.privacy import Charge, compose
from roundtable.privacy.accounting.accountants import gaussian_epsilon
from roundtable.server.jobs import runner as driving
from roundtable.server.jobs.actions import JobParts
from roundtable.server.jobs.job_inbox import JobInbox
from roundtable.server.jobs.privacy_budget import Account
from roundtable.server.jobs.runner import JobRunner
from roundtable.server.operations.measured_lines import MeasuredLines
from roundtable.server.store import ArtifactRow, Database, EventRow, JobRow, UpdateRow
from roundtable.server.store import jobs as store
from roundtable.server.store.job_silo_rows import clients_of
from roundtable.server.store.ledger import entries

NAMES = ("ash", "birch", "cedar", "fir", "oak")
ROUNDS, DELTA, NOISE = 3, 1e-5, 2.0
JOB = f"""
task = "t"
rounds = {ROUNDS}
[cohort]
{{cohort}}
retries = 1
deadline = 20
[aggregation]
weighting = "uniform"
[evaluation]
every = 1
[privacy]
clip_norm = 1.0
delta = {DELTA}
noise_multiplier = {NOISE}
public_evaluation = true
{{more}}
"""
LEVELS = {
    "client": ("size = 2", 'level = "client"'),
    "known": ("size = 2", 'level = "client"\ncohorts = "known"'),
    "dp_ftrl": ("size = 1", 'level = "dp_ftrl"\nseparation = 2\nbands = 2'),
    "blt": ("size = 1", 'level = "dp_ftrl"\nseparation = 2\nbuffers = 2'),
    "cyclic": (
        'strategy = "poisson"\nprobability = 0.5',
        'level = "dp_ftrl"\nseparation = 2\nbands = 2\ncohorts = "hidden"',
    ),
    "distributed": ("size = 5", 'level = "distributed"'),
    "client_local": ("size = 2", 'level = "client_local"'),
}
POINTS = ("transition_due", "transition_open", "transition_stored", "transition_done")


class Crash(Exception):
    """The process has died."""


def drawn_anew(cohorts: set[tuple[str, ...]]) -> bool:
    """Whether they are of several draws: a silo that comes back is told it without those that failed."""
    drawn = set(max(cohorts, key=len))
    return not all(drawn.issuperset(cohort) for cohort in cohorts)


class Nothing:
    """Takes every call: what a driver tells of itself matters to nobody here."""

    def __getattr__(self, name: str) -> Any:
        return lambda *given, **named: None


class World(RuleBasedStateMachine):
    """`shown` are models that somebody has seen, by (round, attempt); `sums` what was unmasked."""

    level = "client"
    blank: Path
    folder: Path

    @initialize()
    def begin(self) -> None:
        cohort, more = LEVELS[self.level]
        self.job = parse_job(JOB.format(cohort=cohort, more=more))
        self.plan = make_plan(self.job, len(NAMES), (slice(0, 4),))
        place = self.folder / f"{secrets.token_hex(8)}.db"
        shutil.copy(self.blank, place)
        self.loop = asyncio.new_event_loop()
        self.database = Database.open(f"sqlite:///{place}")
        self.turn = asyncio.Lock()
        self.armed = ""
        self.shown: dict[tuple[int, int], set[str]] = defaultdict(set)
        self.sums: set[tuple[int, int]] = set()
        self.sent: dict[tuple[str, int, int], int] = defaultdict(int)
        self.cohorts: dict[int, set[tuple[str, ...]]] = defaultdict(set)
        self.answers: list[m.Aggregated] = []
        self.timers: list[str] = []
        self.made = 0
        engine = RoundEngine.begin(self.job, "0" * 64, 7, separation=self.plan.separation)
        row = JobRow(
            id="j",
            name="t",
            request_id="r",
            submitter="olga",
            config=self.job.to_json(),
            initial_model="0" * 64,
            model="0" * 64,
            optimizer="",
            status="waiting",
            reason="",
            rounds=ROUNDS,
            rounds_done=0,
            snapshot={"engine": engine.snapshot()},
            version=1,
            writer="w",
            submitted=0.0,
            updated=0.0,
        )
        first = public(EventRow(1, 0.0, "job_submitted", "here"))
        artifact = ArtifactRow("0" * 64, 1, "model", 0.0)
        self.wait(self.database.write(lambda c: store.insert_job(c, row, artifact, [first])))
        driving.failpoint = self.reach
        self.start()
        self.tell(m.Start())

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.driver.cancel()
            self.loop.run_until_complete(asyncio.gather(self.driver, return_exceptions=True))
            self.database.close()
            self.loop.close()

    def wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    def reach(self, point: str, round: int = 0, phase: str = "") -> None:
        if point == self.armed:
            self.armed = ""
            raise Crash

    def start(self) -> None:
        """A process takes the job up as the database has it."""
        [row] = self.wait(self.database.read(store.jobs_in_order))
        records = self.wait(self.database.read(lambda c: store.history(c, "j")))
        sequence = self.wait(self.database.read(lambda c: store.last_sequence(c, "j")))
        clients = self.wait(self.database.read(lambda c: clients_of(c, "j")))
        history = [record_from_plain(json.loads(record)) for record in records]
        snapshot = {**row.snapshot["engine"], "clients": clients}
        self.engine = RoundEngine.restore(self.job, snapshot, history)
        for name in NAMES:
            self.engine.handle(m.ClientJoined(m.ClientInfo(name), online=False), 0.0)
        self.pending: list[m.Aggregate | m.Authorize] = []
        self.inbox = JobInbox()
        nothing: Any = Nothing()
        nothing.progress = lambda: ""
        self.account = Account("j", self.job, self.plan, "t", self.database, lambda: 0.0, self.turn)
        services: Any = Nothing()
        services.database, services.clock, services.writer = self.database, lambda: 0.0, "w"
        services.observer = services.alerts = Nothing()
        services.links = MeasuredLines(self.database)
        doings: Any = Nothing()
        doings.perform = self.perform
        self.runner = JobRunner(
            replace(row),
            self.job,
            Layout.of({}),
            self.engine,
            JobParts(self.inbox, nothing, nothing, self.account, nothing, nothing),
            doings,
            services,
            sequence,
        )
        self.driver = self.loop.create_task(self.runner.run())
        self.settle()

    def settle(self) -> None:
        """Waits until the driver has done what it can; a process that has died is started anew."""
        self.tell(m.WorkStarted("nobody", m.Step(0, 0, m.TRAIN)))

    def revive(self) -> None:
        if self.driver.done() and not self.runner.final:
            assert isinstance(self.driver.exception(), Crash), self.driver.exception()
            self.start()

    def tell(self, event: m.Event, update: UpdateRow | None = None) -> None:
        """Hands an event to the driver, and waits until it is dealt with or the process has died."""

        async def told() -> None:
            task = asyncio.ensure_future(self.inbox.tell(event, (), (update,) if update else ()))
            await asyncio.wait([task, self.driver], return_when=asyncio.FIRST_COMPLETED)
            task.cancel()

        self.wait(told())
        self.revive()

    def perform(self, action: m.Action) -> None:
        match action:
            case m.Instruct(step=step) if step.phase == m.EVALUATE:
                self.shown[step.round, step.attempt].add(action.model)
            case m.Instruct(step=step):
                self.cohorts[step.round].add(action.cohort)
            case m.Unmask(step):
                self.sums.add((step.round, step.attempt))
            case m.Aggregate() | m.Authorize():
                self.pending.append(action)
            case m.SetTimer(timer):
                self.timers.append(timer)

    @rule(name=st.sampled_from(NAMES))
    def join(self, name: str) -> None:
        self.tell(m.ClientJoined(m.ClientInfo(name)))

    @rule()
    def all_join(self) -> None:
        for name in NAMES:
            self.join(name)

    @rule(name=st.sampled_from(NAMES))
    def leave(self, name: str) -> None:
        self.tell(m.ClientLeft(name))

    def wanted(self, name: str) -> m.Step | None:
        attempt = self.engine.state.attempt
        step = m.Step(attempt.round, attempt.number, m.TRAIN) if attempt else None
        return step if step and self.engine.wants(name, step) == "wanted" else None

    @rule(name=st.sampled_from(NAMES), late=st.booleans(), again=st.booleans())
    def send(self, name: str, late: bool, again: bool = False) -> None:
        """A silo sends its update; `late`: the round is over before the last byte; `again`: the same bytes,
        as the coordinator was killed before it had the first of them."""
        step = self.wanted(name)
        if step is None:
            return
        digest = secrets.token_hex(32)
        for _ in range(1 + again):
            self.wait(self.runner.receive(name, step, digest))
        self.sent[name, step.round, step.attempt] += 1
        if late:
            self.tell(m.Pause("paused by olga"))
        row = UpdateRow(step.round, step.attempt, name, digest, 16, 1, None, {}, "accepted", "", 0.0)
        self.tell(m.UpdateArrived(step, m.Update(name, m.BlobReference(digest), 1)), row)

    @rule(name=st.sampled_from(NAMES))
    def begin_to_send(self, name: str) -> None:
        """The first bytes of an update arrive, and no more of it: the silo trains again, with other noise."""
        if (step := self.wanted(name)) is not None:
            self.wait(self.runner.receive(name, step, secrets.token_hex(32)))
            self.sent[name, step.round, step.attempt] += 1

    @rule()
    def all_send(self) -> None:
        for name in NAMES:
            self.send(name, late=False)

    @rule(name=st.sampled_from(NAMES))
    def fail(self, name: str) -> None:
        attempt = self.engine.state.attempt
        if attempt is not None and attempt.phase in (m.TRAIN, m.EVALUATE):
            step = attempt.step
            failure = SiteFailure(name, step.round, step.attempt, step.phase, "task_error", "it broke")
            self.tell(m.ClientFailed(step, failure))

    @rule(name=st.sampled_from(NAMES))
    def evaluate(self, name: str) -> None:
        if (attempt := self.engine.state.attempt) is not None:
            self.tell(m.Evaluated(name, attempt.step, {"accuracy": (1.0, 1)}))

    @rule(works=st.sampled_from([True, True, True, False]))
    def do_what_is_asked(self, works: bool) -> None:
        """The ledger is asked; updates are combined, with new noise each time, or cannot be."""
        if not self.pending:
            return
        action = self.pending.pop(0)
        if isinstance(action, m.Authorize):
            self.wait(self.account.reserve(action.step))
            self.tell(m.Authorized(action.step))
            return
        pending, process = self.pending, self.runner
        if self.level == "distributed":
            try:
                self.wait(self.account.release(action.step))
            except PrivacyError:
                return  # Nothing is reserved any more: the job has gone on.
            self.tell(m.Unmasking(action.step, {"epsilon": 1.0}))
            if process is not self.runner or pending is not self.pending:
                return
        if not works:
            self.tell(m.AggregationFailed(action.step, "no room"))
            return
        self.made += 1
        event = m.Aggregated(action.step, f"{self.made:064x}", charge={"level": self.job.privacy.level})
        self.answers.append(event)
        self.tell(event)

    @rule(steps=st.integers(1, 4))
    def go_on(self, steps: int) -> None:
        """What would happen next if nothing went wrong."""
        for _ in range(steps):
            attempt = self.engine.state.attempt
            if self.pending:
                self.do_what_is_asked(works=True)
            elif self.engine.state.status == "paused":
                self.resume()
            elif attempt is not None and attempt.phase == m.TRAIN:
                self.all_send()
            elif attempt is not None and attempt.phase == m.EVALUATE and self.engine.population.free():
                for name in NAMES:
                    self.evaluate(name)
            else:
                self.all_join()

    @precondition(lambda self: self.answers)
    @rule()
    def answer_again(self) -> None:
        self.tell(replace(self.answers[-1]))

    @precondition(lambda self: self.timers)
    @rule()
    def time_passes(self) -> None:
        self.tell(m.DeadlinePassed(self.timers.pop()))

    @rule(steps=st.integers(0, 4))
    def pause(self, steps: int) -> None:
        """Operators pause and resume a job at any point, and it goes on."""
        self.tell(m.Pause("paused by olga"))
        if steps:
            self.resume()
            self.go_on(steps)

    @rule()
    def resume(self) -> None:
        self.tell(m.Resume())

    @rule(chance=st.integers(0, 9))
    def cancel(self, chance: int) -> None:
        if chance == 0:
            self.tell(m.Cancel("cancelled by olga"))

    @rule(point=st.sampled_from(POINTS))
    def crash_at(self, point: str) -> None:
        """The process dies the next time that it comes to this place."""
        self.armed = point

    @rule()
    def crash_now(self) -> None:
        if self.runner.final:
            return
        self.driver.cancel()
        self.wait(asyncio.wait([self.driver]))
        self.start()

    @invariant()
    def the_ledger_holds_what_was_released(self) -> None:
        if not hasattr(self, "runner"):
            return
        rows = [row for row in self.wait(self.database.read(lambda c: entries(c, "t"))) if row.released]
        records = [
            json.loads(each) for each in self.wait(self.database.read(lambda c: store.history(c, "j")))
        ]
        shown = {key: set(models) for key, models in self.shown.items()}
        for record in records:
            if not record["closed"]:
                shown.setdefault((record["round"], record["attempt"]), set()).add(record["model"])
        charged = [(row.round, row.attempt) for row in rows]
        match self.level:
            case "client_local":
                counted: dict[tuple[str, int, int], int] = defaultdict(int)
                for row in rows:
                    counted[row.silo, row.round, row.attempt] += 1
                assert counted == self.sent
            case "distributed":
                assert self.sums | shown.keys() <= set(charged)
                assert len({round for round, _ in self.sums}) == len(self.sums), "two sums of one round"
            case _:
                self.check_models(shown, charged, [Charge.from_json(row.charge) for row in rows])
        assert len(charged) == len(set(charged)) or self.level == "client_local"

    def check_models(
        self, shown: dict[tuple[int, int], set[str]], charged: list[tuple[int, int]], charges: list[Charge]
    ) -> None:
        """Each model that was seen is a draw of noise: one to a round, and paid for."""
        assert all(len(models) == 1 for models in shown.values())
        assert shown.keys() <= set(charged), "a model was seen that nobody has paid for"
        assert len({round for round, _ in charged}) == len(charged)
        spent = compose(charges, DELTA)
        if isinstance(self.plan.noise, CorrelatedRounds) and self.plan.noise.ftrl.rate is not None:
            # Each turn through the two groups is one sampled release, from its first round on.
            turn = Charge("gaussian", "client", "poisson", (("update", NOISE),), rate=0.5)
            assert spent >= compose([turn.repeated(-(-len(shown) // 2))], DELTA) - 1e-9
            assert not any(map(drawn_anew, self.cohorts.values())), "a cohort was drawn anew"
        elif isinstance(self.plan.noise, CorrelatedRounds):
            # The noise of the whole run is one Gaussian; so far it has hidden this much of a silo's reach.
            ftrl, done = self.plan.noise.ftrl, len(shown)
            reach = ftrl.sensitivity(done) / ftrl.sensitivity(ROUNDS) if done else 0.0
            assert spent >= (gaussian_epsilon(NOISE / reach, DELTA) if reach else 0.0) - 1e-9
        elif self.level == "known":
            assert spent >= (gaussian_epsilon(NOISE / len(shown) ** 0.5, DELTA) if shown else 0.0) - 1e-9
        else:
            assert not any(map(drawn_anew, self.cohorts.values())), "a cohort was drawn anew"


@pytest.fixture(scope="module")
def blank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty database with its tables."""
    place = tmp_path_factory.mktemp("blank") / "blank.db"
    Database.open(f"sqlite:///{place}").close()
    return place


@pytest.mark.parametrize("level", LEVELS)
def test_whatever_happens_what_is_released_is_charged(
    level: str, blank: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driving, "failpoint", driving.failpoint)
    machine = type(f"World_{level}", (World,), {"level": level, "blank": blank, "folder": tmp_path})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=6,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
