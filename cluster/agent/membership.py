"""Who trains a step together, where each replica of the model is a group of its own that may come and go.

One process decides, the agent, so that all replicas take the same steps: a step is taken once every member
that is still there has all gradients of it, and never by some alone. The idea of a quorum for each step, and
of a late replica that is given another's state, is torchft's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from roundtable.cluster.train.orders import Verdict

MOST_TRIES = 5


@dataclass
class Membership:
    """The replicas of one round. Each method takes what has happened; `verdict` says what follows.

    `expected` are those that are being started: a round begins once each is ready or lost.
    """

    expected: set[int] = field(default_factory=set)
    epoch: int = 0
    steps: int = 0
    tries: int = 0
    stop: bool = False
    _members: tuple[int, ...] = ()
    _ready: dict[int, int] = field(default_factory=dict)
    _reduced: dict[int, bool] = field(default_factory=dict)
    _gone: set[int] = field(default_factory=set)
    _ended: set[int] = field(default_factory=set)

    @property
    def members(self) -> tuple[int, ...]:
        """Those that are in the step and not lost."""
        return tuple(one for one in self._members if one not in self._gone)

    @property
    def silent(self) -> tuple[int, ...]:
        """Members that have not said how the reduction went, while others have."""
        heard = self._reduced.keys() | self._ended
        return tuple(one for one in self.members if one not in heard) if heard else ()

    @property
    def over(self) -> bool:
        """Whether every member has taken the round's last step."""
        return bool(self.members) and self._ended.issuperset(self.members)

    def ready(self, replica: int, steps: int) -> None:
        """A replica has loaded the round's model, or a checkpoint after so many `steps`."""
        self.expected.discard(replica)
        self._ready[replica] = steps

    def reduced(self, replica: int, epoch: int, *, whole: bool) -> None:
        """A member has all gradients of the step, or its reduction broke off; earlier epochs do not count."""
        if epoch == self.epoch and replica in self._members:
            self._reduced[replica] = whole

    def ended(self, replica: int) -> None:
        """A member has taken the round's last step."""
        self._ended.add(replica)

    def lost(self, replica: int) -> None:
        """A replica is gone, or could not be started."""
        self.expected.discard(replica)
        self._ready.pop(replica, None)
        self._gone.add(replica)

    def verdict(self) -> Verdict | None:
        """What follows from all this; None while there is something to wait for."""
        if not self._members:
            return self._begin()
        present = self.members
        if not present or self.over or not self._reduced.keys() >= set(present):
            return None
        if not all(self._reduced.values()) or self._lost_before_it_had_all():
            self.tries += 1
            return self._next(present, committed=False)
        self.steps += 1
        self.tries = 0
        return self._next(present, committed=True)

    def _lost_before_it_had_all(self) -> bool:
        return any(one in self._gone and one not in self._reduced for one in self._members)

    def _begin(self) -> Verdict | None:
        if self.expected or not self._ready:
            return None
        self.steps = max(self._ready.values())
        donor = min(one for one, steps in self._ready.items() if steps == self.steps)
        joining = tuple(sorted(one for one, steps in self._ready.items() if steps < self.steps))
        return self._made(tuple(sorted(self._ready)), joining, donor, committed=False)

    def _next(self, present: tuple[int, ...], *, committed: bool) -> Verdict:
        """The present ones go on; whoever waits comes in between two steps, never within one."""
        coming = tuple(sorted(self._ready)) if committed else ()
        if coming or present != self._members or not committed:
            return self._made((*present, *coming), coming, present[0], committed=committed)
        self._reduced = {}
        return Verdict(self.epoch, committed, self.steps, present, stop=self.stop)

    def _made(
        self, members: tuple[int, ...], joining: tuple[int, ...], donor: int, *, committed: bool
    ) -> Verdict:
        for one in members:
            self._ready.pop(one, None)
            self._gone.discard(one)
        self.epoch += 1
        self._members, self._reduced = tuple(sorted(members)), {}
        return Verdict(self.epoch, committed, self.steps, self._members, joining, donor, stop=self.stop)
