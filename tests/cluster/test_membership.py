"""The rule by which replicas that come and go take the same steps, under any order of events."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from roundtable.cluster.agent.membership import Membership

COUNT = 4


class Replicas(RuleBasedStateMachine):
    """Replicas that do as they are told, are lost and come back at any moment."""

    def __init__(self) -> None:
        super().__init__()
        self.current = Membership(expected=set(range(COUNT)))
        self.alive = set(range(COUNT))
        self.begun: set[int] = set()
        self.taken: dict[int, list[int]] = {}
        self.epoch: dict[int, int] = {}
        self.whole: set[int] = set()
        self.members: tuple[int, ...] = ()

    @initialize(ready=st.permutations(range(COUNT)))
    def start(self, ready: list[int]) -> None:
        for one in ready:
            self.current.ready(one, 0)
            self.follow()

    def follow(self) -> None:
        while (verdict := self.current.verdict()) is not None:
            present = set(self.members) & self.alive
            if verdict.committed:
                assert present <= self.whole, "a step is taken by all who are there"
                for one in present:
                    self.taken[one].append(verdict.steps)
            assert set(verdict.joining) <= set(verdict.members)
            for one in verdict.members:
                if one in verdict.joining:
                    assert verdict.donor in present
                    self.taken[one] = list(self.taken[verdict.donor])
                elif not self.members:
                    self.taken[one] = []
                self.epoch[one] = verdict.epoch
            self.members, self.whole = verdict.members, set()

    @precondition(lambda self: self.members)
    @rule(data=st.data(), whole=st.booleans())
    def reports(self, data: st.DataObject, whole: bool) -> None:
        waiting = sorted(set(self.members) & self.alive)
        if not waiting:
            return
        one = data.draw(st.sampled_from(waiting))
        if whole:
            self.whole.add(one)
        else:
            self.whole.discard(one)
        self.current.reduced(one, self.epoch[one], whole=whole)
        self.follow()

    @precondition(lambda self: self.members)
    @rule(data=st.data())
    def old_words_count_for_nothing(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(sorted(self.members)))
        self.current.reduced(one, self.epoch[one] - 1, whole=True)
        self.follow()

    @precondition(lambda self: len(self.alive & set(self.members)) > 1)
    @rule(data=st.data())
    def is_lost(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(sorted(self.alive)))
        self.alive.discard(one)
        self.current.lost(one)
        self.follow()

    @precondition(lambda self: len(self.alive) < COUNT)
    @rule(data=st.data())
    def comes_back(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(sorted(set(range(COUNT)) - self.alive)))
        self.alive.add(one)
        self.current.ready(one, 0)
        self.follow()

    @invariant()
    def each_step_is_taken_once_and_by_all(self) -> None:
        present = [self.taken[one] for one in self.current.members if one in self.taken]
        assert all(steps == list(range(1, len(steps) + 1)) for steps in present)
        assert all(steps == present[0] for steps in present)


TestReplicas = Replicas.TestCase
TestReplicas.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
