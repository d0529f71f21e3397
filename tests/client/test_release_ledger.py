"""What the ledger of releases lets leave, under a coordinator that chooses every number and every order."""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from roundtable.client.agent.release_ledger import NAME, ReleaseLedger
from roundtable.client.policy.analysis_rules import AskedColumns
from roundtable.client.step_key import StepKey
from roundtable.core.errors import PrivacyError, ProtocolError
from roundtable.privacy.secagg import Session, choose_parameters
from roundtable.privacy.secagg.custody import Cohort

MODEL = "a" * 64
JOB = "job-1"


def cohort(
    *names: str, job: str = JOB, round: int = 1, attempt: int = 1, keys: bytes = b"k", corruption: float = 0.0
) -> Cohort:
    """A cohort of these silos, on the full graph."""
    session = Session(job, round, attempt, 8)
    identities = tuple(keys * 16 + name.encode().ljust(16) for name in names)
    binding = f"{job}.{round}.{attempt}.{'.'.join(names)}".encode()
    parameters = choose_parameters(len(names), 0.0, corruption)
    return Cohort(session, parameters, tuple(names), identities, binding, b"")


def begun(path: Path, of: Cohort) -> ReleaseLedger:
    """The ledger as a process finds it that starts anew, with this attempt begun."""
    ledger = ReleaseLedger(path)
    ledger.begin(StepKey(of.session.job, of.session.round, of.session.attempt, "train"))
    return ledger


def unmasked(path: Path, of: Cohort, survivors: range | None = None, model: str = MODEL) -> None:
    ledger = begun(path, of)
    ledger.mask(of, model)
    ledger.unmask(of, survivors or range(len(of.names)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / NAME


@pytest.mark.parametrize("number", [(2, 3), (2, 2), (1, 9)])
def test_no_number_is_begun_twice_or_backwards(path: Path, number: tuple[int, int]) -> None:
    ledger = begun(path, cohort("a", "b", "c", round=2, attempt=3))
    for known in (ledger, ReleaseLedger(path)):
        with pytest.raises(ProtocolError, match="no attempt is begun twice"):
            known.begin(StepKey(JOB, *number, "train"))
    ledger.begin(StepKey("another", *number, "train"))


@pytest.mark.parametrize(
    "changed",
    [
        {"attempt": 2},
        {"round": 7},
        {"job": "job-2"},
    ],
)
def test_a_second_sum_from_a_model_is_over_the_same_silos(path: Path, changed: dict[str, int]) -> None:
    unmasked(path, cohort("a", "b", "c", "d"))
    ledger = begun(path, cohort("a", "b", "c", **changed))
    with pytest.raises(ProtocolError, match=r"sum from the same model over 4 silos \(a, b, c, d\)"):
        ledger.mask(cohort("a", "b", "c", **changed), MODEL)
    with pytest.raises(ProtocolError, match="from the same model"):
        ledger.mask(cohort("a", "b", "c", "d", keys=b"K", **changed), MODEL)
    ledger.mask(cohort("a", "b", "c", "d", **changed), MODEL)
    ledger.mask(cohort("a", "b", "c", **changed), "another model")


def test_a_dropout_of_the_first_sum_is_none_of_the_second(path: Path) -> None:
    """The survivors may be asked again alone, or with the silo that dropped out, and give the same sum."""
    whole = cohort("a", "b", "c", "d")
    unmasked(path, whole, range(3))
    again = cohort("a", "b", "c", "d", round=2)
    ledger = begun(path, again)
    ledger.mask(again, MODEL)
    with pytest.raises(ProtocolError, match=r"over 3 silos \(a, b, c\)"):
        ledger.unmask(again, range(4))
    ledger.unmask(again, range(3))
    alone = cohort("a", "b", "c", round=3)
    unmasked(path, alone)


def test_analyses_of_a_column_are_over_the_same_silos_or_over_many_others(path: Path) -> None:
    """Padding, another grid or a name hide nothing: the column counts. A restart forgets nothing."""
    age, both = AskedColumns("heart", ("age",), 3), AskedColumns("heart", ("age", "sex"), 3)
    whole = cohort("a", "b", "c", "d", "e")
    first = begun(path, whole)
    first.mask(whole, MODEL, asked=age)
    first.unmask(whole, range(4))

    def again(*names: str, asked: AskedColumns = both, unmask: int = 0) -> None:
        of = cohort(*names, job=f"{'.'.join(names)}-{'.'.join(asked.columns)}-{unmask}")
        ledger = begun(path, of)
        ledger.mask(of, f"model of {of.session.job}", asked=asked)
        if unmask:
            ledger.unmask(of, range(unmask))

    with pytest.raises(ProtocolError, match=r"column 'age' of table 'heart'.*differ from these by e alone"):
        again("a", "b", "c", "d", "e")
    again("a", "b", "c", "d", "e", asked=AskedColumns("heart", ("sex",), 3))
    again("a", "b", "c", "d", asked=AskedColumns("other", ("age",), 3))
    again("a", "f", "g", "h", "i")
    with pytest.raises(ProtocolError, match="differ from these by i alone"):
        again("a", "f", "g", "h", asked=age)
    loose = AskedColumns("heart", ("age",), 1)
    again("a", "b", "c", asked=loose, unmask=3)


def test_the_survivors_of_an_analysis_count_as_its_cohort_does(path: Path) -> None:
    age = AskedColumns("heart", ("age",), 3)
    first, second = cohort(*"abcde"), cohort(*"abcde", job="job-2")
    begun(path, first).mask(first, MODEL, asked=age)
    ledger = begun(path, second)
    ledger.mask(second, "model of job-2", asked=age)
    with pytest.raises(ProtocolError, match="differ from these by e alone"):
        ledger.unmask(second, range(4))
    ledger.unmask(second, range(5))


def test_an_attempt_that_nobody_unmasked_here_binds_its_own_job_to_nothing(path: Path) -> None:
    first, second = cohort("a", "b", "c", "d"), cohort("a", "b", "e", attempt=2)
    begun(path, first).mask(first, MODEL)
    elsewhere = cohort("a", "b", "e", job="job-2")
    with pytest.raises(ProtocolError, match="masked an update from the same model for another job"):
        begun(path, elsewhere).mask(elsewhere, MODEL)
    ledger = begun(path, second)
    ledger.mask(second, MODEL)
    with pytest.raises(ProtocolError, match="is not the one that this silo began last"):
        ledger.unmask(first, range(4))
    ledger.unmask(second, range(3))


def test_only_what_was_masked_is_unmasked_and_one_attempt_of_a_round(path: Path) -> None:
    of = cohort("a", "b", "c")
    ledger = begun(path, of)
    with pytest.raises(ProtocolError, match="has masked nothing"):
        ledger.unmask(of, range(3))
    ledger.mask(of, MODEL, noisy=True)
    with pytest.raises(ProtocolError, match="has masked nothing"):
        ledger.unmask(cohort("a", "b", "d"), range(3))
    ledger.unmask(of, range(3))
    ledger.unmask(of, range(3))
    retry = cohort("a", "b", "c", attempt=2)
    again = begun(path, retry)
    again.mask(retry, MODEL, noisy=True)
    with pytest.raises(ProtocolError, match="another attempt of round 1 was unmasked"):
        again.unmask(retry, range(3))


def test_a_sum_with_noise_is_paid_for_once_for_each_that_can_be_unmasked(path: Path) -> None:
    paid: Counter[str] = Counter()
    for number, (names, round) in enumerate([("abc", 1), ("abc", 1), ("abd", 1), ("abc", 2)], start=1):
        of = cohort(*names, round=round, attempt=number)
        ledger = begun(path, of)
        for _ in range(2):
            ledger.mask(of, MODEL, noisy=True, pay=lambda: paid.update(["sum"]))
    assert paid["sum"] == 3

    def broke() -> None:
        raise PrivacyError("nothing is left")

    of = cohort("a", "b", "c", round=3)
    ledger = begun(path, of)
    with pytest.raises(PrivacyError, match="nothing is left"):
        ledger.mask(of, MODEL, noisy=True, pay=broke)
    with pytest.raises(ProtocolError, match="has masked nothing"):
        ledger.unmask(of, range(3))


def test_updates_and_evaluations_are_counted_by_what_leaves(path: Path) -> None:
    ledger = ReleaseLedger(path, most=2)
    for attempt in range(1, 12):
        ledger.update(StepKey(JOB, 1, attempt, "train"), MODEL, "the same bytes")
    ledger.update(StepKey(JOB, 1, 12, "train"), MODEL, "other bytes")
    with pytest.raises(ProtocolError, match=r"2 updates of this job have left .* \(\[policy\] rounds\)"):
        ledger.update(StepKey(JOB, 2, 1, "train"), MODEL, "new bytes")
    third = cohort("a", "b", "c", round=3)
    ledger.begin(StepKey(JOB, 3, 1, "train"))
    with pytest.raises(ProtocolError, match="2 updates"):
        ledger.mask(third, MODEL)
    for round in (1, 2):
        ledger.evaluation(StepKey(JOB, round, 1, "evaluate"), f"model {round}")
        ledger.evaluation(StepKey(JOB, round, 1, "evaluate"), f"model {round}")
    with pytest.raises(ProtocolError, match="another model was evaluated for round 2, attempt 1"):
        ledger.evaluation(StepKey(JOB, 2, 1, "evaluate"), "model 1")
    with pytest.raises(ProtocolError, match="2 evaluations"):
        ReleaseLedger(path, most=2).evaluation(StepKey(JOB, 3, 1, "evaluate"), "model 3")


def test_half_a_line_tells_of_nothing_that_left_and_damage_stops_everything(path: Path) -> None:
    unmasked(path, cohort("a", "b", "c"))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"kind":"begun","job":"job-1","rou')
    assert ReleaseLedger(path).begun(JOB) == (1, 1)
    assert path.read_bytes() == whole
    for text in (b"\n", b"[]\n", b'{"kind":"loan","job":"j","round":1,"attempt":1}\n', whole[30:]):
        path.write_bytes(text)
        with pytest.raises(ProtocolError, match=r"is damaged: without it two sums"):
            ReleaseLedger(path)


# The rest is one adversary: a coordinator that holds CORRUPT silos and drives the ledgers of the others.

HONEST = ("a", "b", "c", "d", "e", "f")
CORRUPT = 1
MOLE = "mole"
JOBS = st.sampled_from(["x", "y", "noisy"])
MODELS = st.sampled_from(["m", "m", "m", "n"])
COHORTS = st.sampled_from(
    ["abcd", "abc", "def", "abc*", "abcd*", "abcde", "abcdef", "abcdef*", "cdef*", "bcd*"]
)
FEW_COHORTS = st.sampled_from(["abcd", "abcd", "abcde", "abcd*", "abcdef*"])
NUMBERS = st.integers(1, 3)
DROPPED = st.sampled_from(["", "", "d", "de", "*"])
"""Names by their letters; the star is the corrupt silo."""


@dataclass
class Offer:
    """An attempt as the coordinator describes it to silos of its choice."""

    cohort: Cohort
    model: str
    noisy: bool
    masked: set[str] = field(default_factory=set)
    helped: dict[frozenset[int], set[str]] = field(default_factory=dict)

    def sums(self) -> list[frozenset[int]]:
        """Survivor sets for which enough shares are out; the corrupt silo always helps."""
        mole = {MOLE} & set(self.cohort.names)
        return [s for s, helpers in self.helped.items() if len(helpers | mole) >= self.cohort.parameters.t]

    def survivors(self, without: str = "") -> frozenset[int]:
        """Those that have masked, but for some that the coordinator calls dropped."""
        names = enumerate(self.cohort.names)
        return frozenset(
            index
            for index, name in names
            if name[0] not in without.replace("*", "m") and (name == MOLE or name in self.masked)
        )

    def honest(self, survivors: frozenset[int]) -> frozenset[str]:
        return frozenset(self.cohort.names[index] for index in survivors) - {MOLE}


class HostileCoordinator(RuleBasedStateMachine):
    """Arbitrary cohorts, numbers, models and orders; silos are killed and start again from their ledgers."""

    offers = Bundle("offers")

    @initialize()
    def silos(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.ledgers = {name: self._started(name) for name in HONEST}
        self.paid: Counter[str] = Counter()
        self.all: list[Offer] = []

    def _started(self, name: str) -> ReleaseLedger:
        return ReleaseLedger(Path(self._folder.name) / name)

    def _offer(self, job: str, round: int, attempt: int, model: str, names: str) -> Offer:
        members = (*names.replace("*", ""), *([MOLE] if "*" in names else []))
        of = cohort(*members, job=job, round=round, attempt=attempt, corruption=CORRUPT / len(members))
        made = Offer(of, model, job == "noisy")
        self.all.append(made)
        return made

    @rule(
        target=offers,
        job=JOBS,
        round=st.integers(1, 3),
        attempt=st.integers(1, 3),
        model=MODELS,
        names=COHORTS,
    )
    def offer(self, job: str, round: int, attempt: int, model: str, names: str) -> Offer:
        """An attempt of any number."""
        return self._offer(job, round, attempt, model, names)

    @rule(target=offers, job=JOBS, model=MODELS, names=COHORTS, further=st.booleans())
    def masked_offer(self, job: str, model: str, names: str, further: bool) -> Offer:
        """An attempt of the next number, or round, that every silo masks for if it is allowed to."""
        last = max((ledger.begun(job) for ledger in self.ledgers.values()), default=(1, 0))
        round, attempt = (last[0] + 1, 1) if further else (max(last[0], 1), last[1] + 1)
        made = self._offer(job, round, attempt, model, names)
        self.mask_some(made, set(HONEST))
        return made

    @rule(job=JOBS, names=FEW_COHORTS, further=st.booleans(), without=DROPPED)
    def whole(self, job: str, names: str, further: bool, without: str) -> None:
        """All that one attempt can give, from the model that is asked for most."""
        made = self.masked_offer(job, "m", names, further)
        survivors = made.survivors(without)
        if len(survivors) >= made.cohort.parameters.least:
            self._help(made, survivors, sorted(made.honest(survivors)))

    def _mask(self, offer: Offer, name: str) -> None:
        """A silo begins the attempt and masks; it trusts what it is told only as far as its ledger goes."""
        if name not in offer.cohort.names:
            return
        session, ledger = offer.cohort.session, self.ledgers[name]
        pay = (lambda: self.paid.update([name])) if offer.noisy else None
        try:
            ledger.begin(StepKey(session.job, session.round, session.attempt, "train"))
            ledger.mask(offer.cohort, offer.model, noisy=offer.noisy, pay=pay)
        except ProtocolError:
            return
        offer.masked.add(name)

    @rule(offer=offers, only=st.sets(st.sampled_from(HONEST), min_size=1))
    def mask_some(self, offer: Offer, only: set[str]) -> None:
        for name in sorted(only):
            self._mask(offer, name)

    @rule(
        offer=offers,
        without=st.sampled_from(["", "a", "d", "de", "*"]),
        few=st.integers(1, 6),
        data=st.data(),
    )
    def unmask(self, offer: Offer, without: str, few: int, data: st.DataObject) -> None:
        """Some of the silos are told of a survivor set of the coordinator's choice."""
        survivors = offer.survivors(without)
        if len(survivors) >= offer.cohort.parameters.least:
            self._help(offer, survivors, data.draw(st.permutations(sorted(offer.honest(survivors))))[:few])

    def _help(self, offer: Offer, survivors: frozenset[int], names: list[str]) -> None:
        for name in names:
            try:
                self.ledgers[name].unmask(offer.cohort, survivors)
            except ProtocolError:
                continue
            offer.helped.setdefault(survivors, set()).add(name)

    @rule(name=st.sampled_from(HONEST))
    def kill(self, name: str) -> None:
        self.ledgers[name] = self._started(name)

    @invariant()
    def no_combination_of_sums_isolates_anybody(self) -> None:
        """What sums without noise over one model span: nothing but what a majority of a cohort is in."""
        for model in ("m", "n"):
            exact = [offer for offer in self.all if offer.model == model and not offer.noisy]
            made = {offer.honest(s): offer.cohort for offer in exact for s in offer.sums()}
            if not made:
                continue
            least = min(of.parameters.t - CORRUPT for of in made.values())
            rows = [[int(name in chosen) for name in HONEST] for chosen in made]
            for size in range(1, least):
                for few in itertools.combinations(range(len(HONEST)), size):
                    others = [[row[i] for i in range(len(HONEST)) if i not in few] for row in rows]
                    assert rank(others) == rank(rows), (sorted(map(sorted, made)), few)
            for one, other in itertools.combinations(made, 2):
                assert len(one ^ other) > 3 - CORRUPT, (one, other)

    @invariant()
    def what_was_unmasked_is_paid_for(self) -> None:
        made: Counter[str] = Counter()
        for offer in self.all:
            if offer.noisy:
                made.update(name for s in offer.sums() for name in offer.honest(s))
        assert all(made[name] <= self.paid[name] for name in HONEST)

    def teardown(self) -> None:
        self._folder.cleanup()


def rank(rows: list[list[int]]) -> int:
    """Over the rationals, exactly."""
    left, found = [[Fraction(value) for value in row] for row in rows], 0
    for column in range(len(rows[0])):
        pivot = next((row for row in left if row[column]), None)
        if pivot is None:
            continue
        left.remove(pivot)
        found += 1
        left = [
            [value - row[column] / pivot[column] * p for value, p in zip(row, pivot, strict=True)]
            for row in left
        ]
    return found


TestHostileCoordinator = HostileCoordinator.TestCase
TestHostileCoordinator.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)
