"""Buffered rounds under masks in arbitrary interleavings, against a naive account of what was said.

The oracle sees only messages: who was told to train, to mask among whom, or to drop its work. From that alone
follows which sums may be made, and that nobody waits for a group that cannot come about.
"""

from __future__ import annotations

from engine_driver import Driver, job
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from roundtable.core.errors import SiteFailure
from roundtable.engine import messages as m

NAMES = ["a", "b", "c", "d", "e", "f", "g"]
names = st.sampled_from(NAMES)
some = st.lists(names, min_size=2, max_size=len(NAMES), unique=True)
ROUNDS = 4
LEAST = {3: 3, 4: 3, 5: 4}
MASKS = '[privacy]\nlevel = "none"\nsecure_aggregation = true\nclip_norm = 1.0'


class MaskedMachine(RuleBasedStateMachine):
    """`working`, `ready` and `group` are by client (step, model); `masking` is who still masks."""

    driver: Driver

    @initialize(
        size=st.sampled_from([3, 4, 5]),
        concurrency=st.sampled_from([None, 2, 4, 6]),
        stale=st.sampled_from([0, 1, 2, 10]),
        strategy=st.sampled_from(["uniform", "reliability", "round_robin"]),
    )
    def begin(self, size: int, concurrency: int | None, stale: int, strategy: str) -> None:
        lines = ["[round]", 'mode = "buffered"', f"buffer = {size}", f"max_staleness = {stale}"]
        lines += [f"concurrency = {concurrency}"] if concurrency else []
        lines += ["[cohort]", f'strategy = "{strategy}"', "deadline = 20", "retries = 2", "grace = 5", MASKS]
        lines += ["[evaluation]", "every = 0"]
        self.driver = Driver(job("\n".join(lines), rounds=ROUNDS), automatic=False)
        self.size, self.stale = size, stale
        self.working: dict[str, tuple[m.Step, str]] = {}
        self.ready: dict[str, tuple[m.Step, str]] = {}
        self.masking: set[str] = set()
        self.group: dict[str, tuple[m.Step, str]] = {}
        self.out: set[str] = set()
        self.groups: dict[m.Step, tuple[str, ...]] = {}
        self.uploaded: dict[str, str] = {}
        self.online: set[str] = set()
        self.asked: set[tuple[str, m.Step]] = set()
        self.unmasked: list[tuple[str, frozenset[str]]] = []
        self.seen = self.count = 0
        self.act(m.Start())

    @property
    def newest(self) -> str:
        return self.driver.records[-1].model if self.driver.records else "model-0"

    def act(self, *events: m.Event) -> None:
        self.driver.send(*events)
        self.read()

    def read(self) -> None:
        said, self.seen = self.driver.said[self.seen :], len(self.driver.said)
        for action in said:
            match action:
                case m.Withdraw(client, m.Step(phase=m.PREPARE) as step):
                    held = self.working if client in self.working else self.ready
                    assert held.pop(client)[0] == step
                case m.Withdraw(client, m.Step(phase=m.TRAIN)):
                    self.masking.discard(client)
                case m.Instruct(step=m.Step(phase=m.PREPARE)):
                    self.told_to_train(action)
                case m.Instruct(step=m.Step(phase=m.TRAIN)):
                    self.told_to_mask(action)
                case m.Aggregate():
                    self.told_to_sum(action)
                case m.Note("client_failed", client=client) if client in self.group:
                    self.out.add(client)
                    self.masking.discard(client)
                case m.Note("attempt_failed"):
                    self.attempt_is_over()
        if self.driver.engine.state.status == "paused":
            self.group, self.uploaded, self.masking = {}, {}, set()

    def attempt_is_over(self) -> None:
        """Whoever has not failed is as before: its update was masked for nobody."""
        self.ready |= {name: given for name, given in self.group.items() if name not in self.out}
        self.group, self.uploaded, self.masking = {}, {}, set()

    def told_to_train(self, told: m.Instruct) -> None:
        assert told.client in self.online
        if self.working.get(told.client) == (told.step, told.model):
            return
        assert told.model == self.newest
        assert told.client not in {**self.working, **self.ready, **self.group}
        assert (told.client, told.step) not in self.asked
        self.asked.add((told.client, told.step))
        self.working[told.client] = told.step, told.model

    def told_to_mask(self, told: m.Instruct) -> None:
        assert told.client in self.online
        if told.step not in self.groups:
            assert not self.masking
            self.groups[told.step] = told.cohort
            self.group = {name: self.ready.pop(name) for name in told.cohort}
            self.masking, self.uploaded, self.out = set(told.cohort), {}, set()
            assert {model for _, model in self.group.values()} == {told.model}
            known = [tuple(sorted(silos)) for _, silos in self.unmasked]
            assert LEAST[self.size] <= len(told.cohort) <= self.size or told.cohort in known
            # As the silos' ledgers demand: another sum from a model is over others, or is the same sum.
            for model, silos in self.unmasked:
                assert model != told.model or silos.isdisjoint(told.cohort) or silos == set(told.cohort)
        assert set(told.cohort) <= set(self.groups[told.step])
        step = self.group[told.client][0]
        assert told.prepared == (step.round, step.attempt)

    def told_to_sum(self, action: m.Aggregate) -> None:
        assert action.cohort == tuple(sorted(self.group))
        assert {each.client: each.digest for each in action.updates} == self.uploaded
        assert len(self.uploaded) >= min(LEAST[self.size], len(self.group))
        ages = {each.staleness(action.step.round) for each in action.updates}
        assert len(ages) == 1
        assert ages <= set(range(self.stale + 1))
        self.masking = set()

    @rule(chosen=some)
    def many_come(self, chosen: list[str]) -> None:
        for name in chosen:
            self.join(name)

    @rule(chosen=some)
    def many_prepare(self, chosen: list[str]) -> None:
        for name in chosen:
            self.prepare(name)

    @rule(but=st.sets(names, max_size=1))
    def all_upload(self, but: set[str]) -> None:
        for name in sorted(self.masking - but):
            self.upload(name)

    @rule(chosen=some)
    def a_round(self, chosen: list[str]) -> None:
        for each in (self.many_come, self.many_prepare):
            each(chosen)
        self.all_upload(set())

    @rule(name=names)
    def join(self, name: str) -> None:
        self.online.add(name)
        self.driver.join(name)
        self.read()

    @rule(name=names)
    def leave(self, name: str) -> None:
        self.online.discard(name)
        self.act(m.ClientLeft(name))

    @rule(name=names)
    def prepare(self, name: str) -> None:
        if name in self.working:
            self.ready[name] = self.working.pop(name)
            self.act(m.UpdateReady(name, self.ready[name][0]))

    @rule(name=names, round=st.integers(1, 3), phase=st.sampled_from([m.PREPARE, m.TRAIN]))
    def odd_prepared(self, name: str, round: int, phase: str) -> None:
        step = m.Step(round, 1, phase)
        if self.working.get(name, (None,))[0] != step:
            self.act(m.UpdateReady(name, step))

    @rule(name=names)
    def upload(self, name: str) -> None:
        step = (
            self.driver.engine.state.attempt.step
            if self.driver.engine.state.attempt
            else m.Step(1, 1, "train")
        )
        if name in self.masking:
            self.count += 1
            self.masking.discard(name)
            self.uploaded[name] = f"u{self.count}"
            assert self.driver.engine.wants(name, step) == "wanted"
            self.act(m.UpdateArrived(step, m.Update(name, m.BlobReference(f"u{self.count}"), 0)))
        else:
            assert self.driver.engine.wants(name, step) != "wanted"
            self.act(m.UpdateArrived(step, m.Update(name, m.BlobReference("odd"), 0)))

    @rule(name=names, masks=st.booleans())
    def fail(self, name: str, masks: bool) -> None:
        step = self.working.pop(name, self.ready.pop(name, (m.Step(1, 1, m.PREPARE), "")))[0]
        if name in self.masking and masks:
            step = next(reversed(self.groups))
            self.masking.discard(name)
        failure = SiteFailure(name, step.round, step.attempt, step.phase, "task_error", "it broke")
        self.act(m.ClientFailed(step, failure))

    @rule(seconds=st.sampled_from([1, 6, 12, 40]))
    def wait(self, seconds: int) -> None:
        self.driver.advance(seconds)
        self.read()

    @rule()
    def finish(self) -> None:
        while self.driver.pending:
            action = self.driver.pending.pop(0)
            if isinstance(action, m.Aggregate):
                self.unmask(action)
                self.act(m.Aggregated(action.step, f"model-{action.step.round}"))
            else:
                assert isinstance(action, m.Commit)
                self.commit(action)

    def unmask(self, action: m.Aggregate) -> None:
        if self.driver.engine.state.attempt and self.driver.engine.state.attempt.step == action.step:
            self.unmasked.append((next(iter(self.group.values()))[1], frozenset(self.uploaded)))
            self.act(m.Unmasking(action.step))

    def commit(self, action: m.Commit) -> None:
        if action.record.round > len(self.driver.records):
            self.driver.records.append(action.record)
            self.group, self.uploaded, self.masking = {}, {}, set()
        self.act(m.Committed(action.record.round))

    @precondition(lambda self: any(isinstance(a, m.Aggregate) for a in self.driver.pending))
    @rule(seen=st.booleans())
    def sum_fails(self, seen: bool) -> None:
        """Before it was unmasked the group may be formed again; afterwards its round is closed."""
        action = self.driver.pending.pop(0)
        if not isinstance(action, m.Aggregate):
            self.driver.pending.insert(0, action)
            return
        if seen:
            self.unmask(action)
        self.act(m.AggregationFailed(action.step, "no"))

    @precondition(lambda self: any(isinstance(a, m.Aggregate) for a in self.driver.pending))
    @rule(name=names)
    def a_masked_update_is_damaged(self, name: str) -> None:
        action = self.driver.pending[0]
        if isinstance(action, m.Aggregate) and name in self.uploaded:
            self.driver.pending.pop(0)
            del self.uploaded[name]
            self.act(m.AggregationFailed(action.step, "no", {name: "rotten"}))

    @rule()
    def restart(self) -> None:
        self.driver.restart()
        self.read()

    @rule(often=st.integers(0, 5))
    def pause_and_resume(self, often: int) -> None:
        if often:
            return
        self.act(m.Pause("lunch"))
        self.act(m.Resume())

    @invariant()
    def nobody_waits_for_what_cannot_come(self) -> None:
        if not hasattr(self, "driver"):
            return
        state = self.driver.engine.state
        told = {name: given.step for name, given in {**state.at_work, **state.ready}.items()}
        assert told == {name: step for name, (step, _) in {**self.working, **self.ready}.items()}
        if state.attempt is None or state.attempt.phase != m.TRAIN or state.attempt.group:
            return
        both = {**self.working, **self.ready}
        for model in {model for _, model in both.values()} - {self.newest}:
            silos = {name for name, (_, from_) in both.items() if from_ == model}
            assert len(silos) >= LEAST[self.size]
            assert not silos <= self.ready.keys() & self.online or len(silos) > self.size

    @invariant()
    def commits_are_in_order(self) -> None:
        if hasattr(self, "driver"):
            rounds = [record.round for record in self.driver.records]
            assert rounds == list(range(1, len(rounds) + 1))

    def teardown(self) -> None:
        """Whatever happened, a healthy fleet finishes the job from here."""
        if not hasattr(self, "driver"):
            return
        driver = self.driver
        for _ in range(80):
            self.finish()
            if driver.engine.state.status in ("finished", "failed"):
                break
            if driver.engine.state.status == "paused":
                self.act(m.Resume())
            for step in (self.join, self.prepare, self.upload):
                for name in NAMES:
                    step(name)
            self.wait(6)
        assert driver.engine.state.status in ("finished", "failed")
        assert len(driver.records) == ROUNDS


TestMaskedBuffered = MaskedMachine.TestCase
TestMaskedBuffered.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
