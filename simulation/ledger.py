"""What the coordinator's ledger and the silos' own accounts would hold of one simulated job.

Budgets stop a simulation where they would stop the real job. The noise is seeded, so that nothing is
guaranteed; the figures say what a real run with the same settings would spend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from roundtable.core.config import JobConfig
from roundtable.core.errors import BudgetExceeded
from roundtable.core.privacy_table import NoPrivacy, OwnNoise, Private
from roundtable.engine import messages as m
from roundtable.engine.validation.round_plan import Plan
from roundtable.privacy import (
    Budget,
    Charge,
    Spent,
    compose,
    example_charge,
    hold,
    merged,
    relation_of,
    statement,
)


class SimulatedLedger:
    """The accounts of one job: one that all clients share, or where they add the noise, one each."""

    def __init__(self, job: JobConfig, plan: Plan) -> None:
        self._job = job
        self._plan = plan
        self._privacy = plan.privacy
        self._shared: tuple[Charge, ...] = ()
        self._own: dict[str, tuple[Charge, ...]] = {}
        self._attempts: dict[tuple[int, int], Charge] = {}
        self._paid: dict[str, list[str]] = {}
        self._releases = 0
        self._rounds: dict[str, int] = {}

    @property
    def keeps_own(self) -> bool:
        """Whether each client pays for what it sends."""
        return isinstance(self._privacy, OwnNoise)

    def authorize(self, step: m.Step) -> m.Authorized | m.Denied:
        """The coordinator's answer before a round."""
        charge = self._plan.charge_of(step.round) or self._plan.silo_charge(step.round)
        if charge is not None and (budget := self._budget("the simulated population")) is not None:
            try:
                for charges in {self._shared, *self._own.values()}:
                    hold(budget, charges, charge)
            except BudgetExceeded as error:
                return m.Denied(step, str(error))
        return m.Authorized(step)

    def pay(self, client: str, round: int, examples: int) -> None:
        """Charges a client for one training. Raises what a silo's own account raises: BudgetExceeded."""
        charge = self._plan.silo_charge(round) or example_charge(self._job, examples)
        before = self._own.get(client, ())
        if (budget := self._budget(f"the data of {client}")) is not None:
            hold(budget, before, charge)
        self._take(client, charge)
        self._paid.setdefault(charge.to_json(), []).append(client)

    def release(self, step: m.Step) -> None:
        """A model of this attempt is shown to clients, or committed: it is paid for, once."""
        charge = self._plan.charge_of(step.round)
        if charge is not None and (step.round, step.attempt) not in self._attempts:
            self._attempts[step.round, step.attempt] = charge
            self._shared = merged([*self._shared, charge])
            self._releases += 1

    def spending(self, step: m.Step) -> Mapping[str, Any]:
        """What a round's record says beside its charge: ε so far, and what a resumed run needs."""
        if isinstance(self._privacy, NoPrivacy):
            return {}
        self.release(step)
        spent = self._spent(self._privacy)
        figures: dict[str, Any] = {"epsilon": spent.epsilon, "delta": spent.delta, "guarantee": False}
        if self.keeps_own:
            return {**figures, "paid": dict(self._paid)}
        return {**figures, "charged_attempts": [a for r, a in self._attempts if r == step.round]}

    def committed(self) -> None:
        """Notes that the round's record is durable: its payments are not told again."""
        self._paid = {}

    def statement(self) -> str:
        """The guarantee that a real run would have, in words that begin by saying that this has none."""
        privacy = self._privacy
        assert not isinstance(privacy, NoPrivacy), "without a guarantee there is nothing to state"
        return statement(privacy, self._spent(privacy), self._plan.sampling, guarantee=False)

    def resume(self, history: Sequence[m.RoundRecord]) -> None:
        """Sets the accounts to what the records of these rounds say."""
        for record in history:
            for attempt in record.charge.get("charged_attempts", ()):
                self.release(m.Step(record.round, attempt, m.COMMIT))
            for text, clients in record.charge.get("paid", {}).items():
                charge = Charge.from_json(text)
                for client in clients:
                    self._take(client, charge)

    def _take(self, client: str, charge: Charge) -> None:
        self._own[client] = merged([*self._own.get(client, ()), charge])
        self._rounds[client] = self._rounds.get(client, 0) + 1

    def _spent(self, privacy: Private) -> Spent:
        """The account of the client that has spent most."""
        delta, accountant = privacy.delta, privacy.accountant
        accounts = {self._shared, *self._own.values()}
        most = max(accounts, key=lambda charges: compose(charges, delta, accountant))
        rounds = [self._rounds[client] for client, charges in self._own.items() if charges == most]
        releases = max(rounds, default=self._releases)
        jobs = (self._job.title,)
        epsilon = compose(most, delta, accountant)
        return Spent(self._job.title, epsilon, delta, relation_of(most), releases, jobs)

    def _budget(self, whose: str) -> Budget | None:
        if isinstance(self._privacy, NoPrivacy) or self._privacy.epsilon is None:
            return None
        return Budget(whose, self._privacy.epsilon, self._privacy.delta, self._privacy.accountant)
