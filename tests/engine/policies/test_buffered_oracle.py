"""Buffered rounds under arbitrary interleavings, against a naive account of what was asked and answered.

The oracle sees only messages: who was told to work on what, who was told to stop, what was sent. From
that alone follows what each model must be made of.
"""

from __future__ import annotations

from engine_driver import Driver, job
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from roundtable.core.errors import SiteFailure
from roundtable.engine import messages as m

NAMES = ["a", "b", "c", "d", "e"]
names = st.sampled_from(NAMES)
ROUNDS = 4


class BufferedMachine(RuleBasedStateMachine):
    """`working` is who was asked and neither answered nor stopped; `waiting` what came and is not used."""

    driver: Driver

    @initialize(
        size=st.sampled_from([1, 2, 3]),
        concurrency=st.sampled_from([None, 1, 2, 4]),
        stale=st.sampled_from([0, 1, 2, 10]),
        strategy=st.sampled_from(["uniform", "data_size", "reliability", "round_robin"]),
        every=st.sampled_from([0, 1]),
    )
    def begin(self, size: int, concurrency: int | None, stale: int, strategy: str, every: int) -> None:
        lines = ["[round]", 'mode = "buffered"', f"buffer = {size}", f"max_staleness = {stale}"]
        lines += [f"concurrency = {concurrency}"] if concurrency else []
        lines += ["[cohort]", f'strategy = "{strategy}"', "deadline = 20", "retries = 2", "grace = 5"]
        lines += ["[evaluation]", f"every = {every}", "deadline = 7"]
        self.driver = Driver(job("\n".join(lines), rounds=ROUNDS), automatic=False)
        self.size, self.limit, self.stale = size, concurrency or len(NAMES), stale
        self.working: dict[str, m.Step] = {}
        self.waiting: dict[str, tuple[m.Step, str]] = {}
        self.online: set[str] = set()
        self.asked: set[tuple[str, m.Step]] = set()
        self.seen = 0
        self.aggregated: list[m.Aggregate] = []
        self.count = 0
        self.act(m.Start())

    def act(self, *events: m.Event, crowded: bool = False) -> None:
        """Sends, and reads what was said in answer."""
        self.driver.send(*events)
        self.read(crowded)

    def read(self, crowded: bool = False) -> None:
        said, self.seen = self.driver.said[self.seen :], len(self.driver.said)
        for action in said:
            match action:
                case m.Withdraw(client, step) if step.phase == "train":
                    assert self.working.pop(client) == step
                case m.Aggregate():
                    self.check_aggregate(action)
                case m.Instruct() if action.step.phase == "train":
                    self.check_instruction(action, crowded)
        if self.driver.engine.state.status == "paused":
            self.waiting.clear()  # A job that is paused, by itself too, begins its round anew.

    def check_aggregate(self, action: m.Aggregate) -> None:
        """All that waits, and nothing else, goes into the model; nothing too old is among it."""
        if action in self.aggregated:
            return  # After a restart what was being combined is asked for once more.
        self.aggregated.append(action)
        assert {u.client: u.digest for u in action.updates} == {n: d for n, (_, d) in self.waiting.items()}
        ages = {n: action.step.round - step.round for n, (step, _) in self.waiting.items()}
        assert {u.client: u.staleness(action.step.round) for u in action.updates} == ages
        assert all(0 <= age <= self.stale for age in ages.values())
        assert len(action.updates) >= self.size // 2 + 1
        self.waiting.clear()

    def check_instruction(self, told: m.Instruct, crowded: bool) -> None:
        again = self.working.get(told.client) == told.step
        assert told.client in self.online
        assert told.model == f"model-{told.step.round - 1}"
        if again:
            return
        assert told.client not in self.working
        assert told.client not in self.waiting
        assert (told.client, told.step) not in self.asked
        self.asked.add((told.client, told.step))
        self.working[told.client] = told.step
        assert crowded or len(self.working.keys() & self.online) <= self.limit

    @rule(name=names)
    def join(self, name: str) -> None:
        self.online.add(name)
        self.driver.join(name)
        # Whoever comes back to old work may be one too many.
        self.read(crowded=True)

    @rule(name=names)
    def leave(self, name: str) -> None:
        self.online.discard(name)
        self.act(m.ClientLeft(name))

    def deliver(self, name: str, step: m.Step) -> None:
        self.count += 1
        digest = f"u{self.count}"
        verdict = self.driver.engine.wants(name, step)
        if self.working.get(name) == step:
            del self.working[name]
            self.waiting[name] = (step, digest)
            assert verdict == "wanted"
        else:
            assert verdict == ("duplicate" if self.waiting.get(name, (None,))[0] == step else "stale") or (
                verdict == "duplicate" and (name, step) in self.asked
            )
        self.act(m.UpdateArrived(step, m.Update(name, m.BlobReference(digest), 5, 0.5)))

    @rule(name=names)
    def update(self, name: str) -> None:
        self.deliver(name, self.working.get(name, m.Step(1, 1, "train")))

    @rule(name=names, back=st.integers(0, 3), attempt=st.integers(1, 2))
    def odd_update(self, name: str, back: int, attempt: int) -> None:
        self.deliver(name, m.Step(max(1, len(self.driver.records) + 1 - back), attempt, "train"))

    @rule(name=names)
    def fail(self, name: str) -> None:
        step = self.working.pop(name, m.Step(1, 1, "train"))
        failure = SiteFailure(name, step.round, step.attempt, "train", "task_error", "it broke")
        self.act(m.ClientFailed(step, failure))

    @rule(name=names)
    def evaluate(self, name: str) -> None:
        attempt = self.driver.engine.state.attempt
        if attempt is not None:
            self.act(m.Evaluated(name, attempt.step, {"accuracy": (1.0, 1)}))

    @precondition(lambda self: any(isinstance(a, m.Aggregate) for a in self.driver.pending))
    @rule(name=names)
    def an_update_is_damaged(self, name: str) -> None:
        """The round fills again with all the others, those that came meanwhile among them."""
        action = self.driver.pending.pop(0)
        attempt = self.driver.engine.state.attempt
        if not isinstance(action, m.Aggregate) or attempt is None or attempt.step != action.step:
            return
        kept = [u for u in action.updates if u.client != name]
        if len(kept) < len(action.updates):
            for each in kept:
                assert each.asked is not None
                self.waiting[each.client] = (m.Step(*each.asked, "train"), each.digest)
            self.aggregated = [each for each in self.aggregated if each.step != action.step]
        self.act(m.AggregationFailed(action.step, "no", {name: "rotten"}))

    @rule(seconds=st.sampled_from([1, 6, 12, 40]))
    def wait(self, seconds: int) -> None:
        self.driver.advance(seconds)
        self.read()

    @rule()
    def finish(self) -> None:
        self.driver.finish_pending()
        self.read()

    @precondition(lambda self: any(isinstance(a, m.Aggregate) for a in self.driver.pending))
    @rule()
    def aggregation_fails(self) -> None:
        action = self.driver.pending.pop(0)
        if isinstance(action, m.Aggregate):
            self.act(m.AggregationFailed(action.step, "no"))

    @rule()
    def restart(self) -> None:
        self.driver.restart()
        self.read(crowded=True)

    @rule()
    def pause_and_resume(self) -> None:
        self.act(m.Pause("lunch"))
        self.act(m.Resume())

    @invariant()
    def commits_are_in_order(self) -> None:
        if hasattr(self, "driver"):
            rounds = [record.round for record in self.driver.records]
            assert rounds == list(range(1, len(rounds) + 1))
            assert all(record.model == f"model-{record.round}" for record in self.driver.records)

    @invariant()
    def the_engine_knows_who_is_at_work(self) -> None:
        if hasattr(self, "driver"):
            state = self.driver.engine.state
            assert {name: given.step for name, given in state.at_work.items()} == self.working

    def teardown(self) -> None:
        """Whatever happened, a healthy fleet finishes the job from here."""
        if not hasattr(self, "driver"):
            return
        driver = self.driver
        for _ in range(80):
            driver.finish_pending()
            self.read(crowded=True)
            status = driver.engine.state.status
            if status == "finished":
                break
            if status == "paused":
                self.act(m.Resume())
            for name in NAMES:
                self.join(name)
            for name, step in list(self.working.items()):
                if self.working.get(name) == step:
                    self.deliver(name, step)
            for name in NAMES:
                self.evaluate(name)
            driver.advance(6)
            self.read(crowded=True)
        assert driver.engine.state.status == "finished"
        assert len(driver.records) == ROUNDS


TestBuffered = BufferedMachine.TestCase
TestBuffered.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_job_that_has_paused_by_itself_wants_nothing_of_what_it_had() -> None:
    machine = BufferedMachine()
    machine.begin(size=2, concurrency=None, stale=0, strategy="uniform", every=0)
    for name in "da":
        machine.join(name)
    machine.update("d")
    for _ in range(2):
        machine.wait(40)
    assert machine.driver.engine.state.status == "paused"
    machine.update("d")
    machine.teardown()
