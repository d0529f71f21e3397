"""The engine under arbitrary interleavings, against a naive model that knows only the rules.

The machine throws joins, losses, updates (right, late, doubled, foreign), failures, deadlines,
sums that are unmasked, pauses and restarts at one job, and compares what is committed with what the
oracle allows.
"""

from __future__ import annotations

from engine_driver import Driver, job
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from roundtable.core.errors import MODEL_MISMATCH
from roundtable.engine import RoundEngine
from roundtable.engine import messages as m

NAMES = ["a", "b", "c", "d", "e"]
names = st.sampled_from(NAMES)
ROUNDS = 3
COST = {"epsilon": 0.25}


class RoundMachine(RuleBasedStateMachine):
    """`accepted` is the oracle: the first valid update of each cohort member in each attempt."""

    driver: Driver

    @initialize(
        size=st.sampled_from([None, 1, 2, 3]),
        minimum=st.sampled_from([None, 1]),
        over=st.sampled_from([1.0, 1.6]),
        strategy=st.sampled_from(["uniform", "data_size", "reliability", "round_robin"]),
        every=st.sampled_from([0, 1]),
        unchecked=st.booleans(),
    )
    def begin(
        self, size: int | None, minimum: int | None, over: float, strategy: str, every: int, unchecked: bool
    ) -> None:
        lines = [
            "[cohort]",
            f'strategy = "{strategy}"',
            "deadline = 20",
            "retries = 2",
            f"over_selection = {over}",
        ]
        lines += [f"size = {size}"] if size else []
        lines += [f"minimum = {minimum}"] if minimum else []
        lines += ["[evaluation]", f"every = {every}", "deadline = 7"]
        self.driver = Driver(job("\n".join(lines), rounds=ROUNDS), automatic=False)
        self.driver.engine = RoundEngine.begin(self.driver.job, "model-0", 7, unchecked=unchecked)
        self.unchecked = unchecked
        self.apart: dict[m.Step, set[str]] = {}
        self.accepted: dict[m.Step, dict[str, str]] = {}
        self.damaged: dict[tuple[m.Step, str], str] = {}
        self.cancelled = False
        self.count = 0
        self.driver.send(m.Start())

    @property
    def attempt(self):  # type: ignore[no-untyped-def]
        return self.driver.engine.state.attempt

    @rule(name=names)
    def join(self, name: str) -> None:
        self.driver.join(name)

    @rule(name=names)
    def leave(self, name: str) -> None:
        self.driver.send(m.ClientLeft(name))

    @rule(name=names, shift=st.sampled_from([0, 0, 0, 0, -1, 1]))
    def update(self, name: str, shift: int) -> None:
        step = m.Step(1, 1, "train")
        if self.attempt is not None:
            step = m.Step(self.attempt.round, self.attempt.number + shift, "train")
        self.count += 1
        digest = f"u{self.count}"
        open_to = self.attempt is not None and self.attempt.phase == "train" and shift == 0
        if open_to and name in self.attempt.awaited:
            # What was accepted once is never replaced by anything else.
            first = self.damaged.pop((step, name), digest)
            self.accepted.setdefault(step, {}).setdefault(name, first)
        self.driver.send(m.UpdateArrived(step, m.Update(name, m.BlobReference(digest), 5, 0.5)))

    @rule(name=names)
    def fail(self, name: str) -> None:
        if self.attempt is not None and self.attempt.phase:
            self.driver.fail(name)

    @rule(name=names)
    def has_another_model(self, name: str) -> None:
        if self.attempt is not None and self.attempt.phase == "check":
            if name in self.attempt.awaited:
                self.apart.setdefault(self.attempt.step, set()).add(name)
            self.driver.fail(name, MODEL_MISMATCH)

    @rule(name=names)
    def evaluate(self, name: str) -> None:
        if self.attempt is not None:
            self.driver.send(m.Evaluated(name, self.attempt.step, {"accuracy": (1.0, 1)}))

    @rule(name=names, state=st.sampled_from(["training", "uploading"]))
    def work(self, name: str, state: m.ClientState) -> None:
        if self.attempt is not None:
            self.driver.send(m.WorkStarted(name, self.attempt.step, state))

    @rule(seconds=st.sampled_from([1, 5, 12, 40]))
    def wait(self, seconds: int) -> None:
        self.driver.advance(seconds)

    @rule()
    def finish(self) -> None:
        self.driver.finish_pending()

    @precondition(lambda self: any(isinstance(a, m.Aggregate) for a in self.driver.pending))
    @rule()
    def aggregation_fails(self) -> None:
        action = self.driver.pending.pop(0)
        if isinstance(action, m.Aggregate):
            self.driver.send(m.AggregationFailed(action.step, "no"))

    @precondition(lambda self: any(isinstance(a, m.Aggregate) for a in self.driver.pending))
    @rule(which=st.sets(names, min_size=1))
    def updates_are_damaged(self, which: set[str]) -> None:
        action = self.driver.pending.pop(0)
        if not isinstance(action, m.Aggregate):
            return
        step = m.Step(action.step.round, action.step.attempt, "train")
        held = self.accepted.get(step, {})
        runs = self.attempt is not None and action.step == self.attempt.step
        if runs and which & held.keys() and action.step.round not in self.unmasked():
            self.driver.aggregates = [each for each in self.driver.aggregates if each.step != action.step]
            for name in which & held.keys():
                self.damaged[step, name] = held.pop(name)
        self.driver.send(m.AggregationFailed(action.step, "no", dict.fromkeys(which, "rotten")))

    @precondition(lambda self: any(isinstance(a, m.Aggregate) for a in self.driver.pending))
    @rule()
    def unmask(self) -> None:
        """The sum of the updates is about to be unmasked; or of those of an attempt that is over."""
        action = next(a for a in self.driver.pending if isinstance(a, m.Aggregate))
        self.driver.send(m.Unmasking(action.step, COST))

    def unmasked(self) -> dict[int, set[int]]:
        """round → the attempts of which silos may have been asked to unmask the sum."""
        found: dict[int, set[int]] = {}
        for action in self.driver.said:
            if isinstance(action, m.Unmask):
                found.setdefault(action.step.round, set()).add(action.step.attempt)
        return found

    @rule()
    def stale_answers(self) -> None:
        self.driver.send(
            m.Aggregated(m.Step(0, 1, "aggregate"), "bad"),
            m.Committed(99),
            m.Unmasking(m.Step(0, 1, "aggregate"), COST),
            m.Unmasking(m.Step(1, 1, "train"), COST),
            m.DeadlinePassed("deadline:0.9.train"),
            m.Authorized(m.Step(1, 1, "authorize")),
        )

    @rule()
    def restart(self) -> None:
        self.driver.restart()

    @rule()
    def pause_and_resume(self) -> None:
        self.driver.send(m.Pause("lunch"))
        self.driver.send(m.Resume())

    @invariant()
    def commits_are_in_order_and_never_of_a_bad_model(self) -> None:
        if not hasattr(self, "driver"):
            return
        assert [record.round for record in self.driver.records] == list(
            range(1, len(self.driver.records) + 1)
        )
        assert len(self.driver.records) <= ROUNDS
        before = "model-0"
        for record in self.driver.records:
            assert record.model == (before if record.closed else f"model-{record.round}")
            before = record.model

    @invariant()
    def the_sum_of_a_round_is_unmasked_in_one_attempt_and_paid_for(self) -> None:
        if not hasattr(self, "driver"):
            return
        unmasked = self.unmasked()
        assert all(len(attempts) == 1 for attempts in unmasked.values())
        for action in self.driver.said:
            if isinstance(action, m.Instruct | m.Aggregate | m.Unmask) and action.step.round in unmasked:
                assert action.step.attempt <= max(unmasked[action.step.round])
        for record in self.driver.records:
            assert {record.attempt} == unmasked.get(record.round, {record.attempt})
            assert not record.closed or (record.round in unmasked and record.charge == COST)
            assert not record.closed or not (record.contributors or record.weights or record.training)

    @invariant()
    def a_model_that_was_shown_is_that_of_its_round(self) -> None:
        if not hasattr(self, "driver"):
            return
        shown = {action.step for action in self.driver.instructions if action.step.phase == "evaluate"}
        assert len({step.round for step in shown}) == len(shown)
        attempts = {record.round: record.attempt for record in self.driver.records}
        assert all(attempts.get(step.round, step.attempt) == step.attempt for step in shown)

    @invariant()
    def the_model_that_clients_get_is_the_one_last_committed(self) -> None:
        if not hasattr(self, "driver"):
            return
        attempt, records = self.driver.engine.state.attempt, self.driver.records
        if attempt is None or attempt.phase in ("train", "aggregate", "select"):
            last = records[-1].model if records else "model-0"
            assert self.driver.engine.state.model == last
            assert attempt is None or attempt.round == len(records) + 1

    @invariant()
    def what_is_combined_is_what_the_oracle_accepted(self) -> None:
        if not hasattr(self, "driver"):
            return
        for action in self.driver.aggregates:
            step = m.Step(action.step.round, action.step.attempt, "train")
            assert {u.client: u.digest for u in action.updates} == self.accepted.get(step, {})
            assert set(self.accepted.get(step, {})) <= set(action.cohort)
            quorum = self.driver.job.cohort.minimum or 1
            assert len(action.updates) >= min(quorum, len(action.cohort))

    @invariant()
    def instructions_go_to_the_cohort_and_attempts_never_repeat(self) -> None:
        if not hasattr(self, "driver"):
            return
        cohorts: dict[m.Step, tuple[str, ...]] = {}
        failed: set[tuple[m.Step, str]] = set()
        for note in self.driver.notes:
            if note.kind == "round_started":
                step = m.Step(note.round, note.attempt, "train")
                assert step not in cohorts
                cohorts[step] = tuple(note.detail["cohort"])
            elif note.kind == "client_replaced":
                step = m.Step(note.round, note.attempt, "train")
                failed.remove((step, note.client))  # At most once each.
                assert note.detail["replacement"] not in cohorts[step]
                cohorts[step] += (note.detail["replacement"],)
            elif note.kind == "client_failed" and note.detail["phase"] == "train":
                failed.add((m.Step(note.round, note.attempt, "train"), note.client))
        trained = [i for i in self.driver.instructions if i.step.phase == "train"]
        assert all(i.client in cohorts[i.step] for i in trained)

    @invariant()
    def nobody_trains_before_the_models_were_compared(self) -> None:
        """Nor do those with another model in the attempt that compared them."""
        if not hasattr(self, "driver"):
            return
        checked = {i.step for i in self.driver.instructions if i.step.phase == "check"}
        trained = [i for i in self.driver.instructions if i.step.phase == "train"]
        assert not checked or self.unchecked
        assert not trained or checked or not self.unchecked
        assert all(step.round == 1 for step in checked)
        assert not trained or all(step.attempt <= trained[0].step.attempt for step in checked)
        for step, apart in self.apart.items():
            assert not any(
                i.client in apart and i.step.attempt == step.attempt and i.step.round == 1 for i in trained
            )

    @invariant()
    def nobody_idles_whose_update_would_be_wanted(self) -> None:
        """In the place of one that has failed, as long as there is time, and so many times in an attempt."""
        attempt = getattr(self, "driver", None) and self.attempt
        if attempt is None or attempt.phase != "train":
            return
        idle = set(self.driver.engine.population.free()) - set(attempt.cohort)
        if idle and self.driver.now < attempt.deadline and len(attempt.replacements) < attempt.target:
            assert len(attempt.updates) + len(attempt.awaited) >= attempt.target

    def teardown(self) -> None:
        """Whatever happened, a healthy fleet finishes the job from here."""
        if not hasattr(self, "driver"):
            return
        driver = self.driver
        driver.finish_pending()
        for _ in range(60):
            status = driver.engine.state.status
            if status in ("finished", "failed"):
                break
            if status == "paused":
                driver.send(m.Resume())
            driver.join(*NAMES)
            if self.attempt is not None and self.attempt.phase == "train":
                for name in driver.cohort():
                    self.update(name, 0)
            elif self.attempt is not None and self.attempt.phase in ("check", "evaluate"):
                for name in NAMES:
                    driver.evaluate(name)
            driver.advance(1)
            driver.finish_pending()
        nothing = all(record.closed for record in driver.records)
        assert driver.engine.state.status == ("failed" if nothing else "finished")
        assert len(driver.records) == ROUNDS
        self.what_is_combined_is_what_the_oracle_accepted()


TestRounds = RoundMachine.TestCase
TestRounds.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
