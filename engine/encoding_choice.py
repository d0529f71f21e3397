"""Which encoding a client's updates get, by what was measured of its line and its updates.

Policy `time`: among the candidates that keep `max_error`, one whose expected time from the instruction to the
update's arrival is the shortest, or all but; of those the most exact:

    T(c) = rest + round trip + d · (bytes of c a value / rate up + seconds of c a value)

The choice is made when a round first asks the client, is kept with the engine's state, and holds for all
attempts at the round: a retry and a restart say the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from roundtable.core.encodings import get_encoding
from roundtable.core.job_tables.choice_table import LEAST_RATIO, MOST_RATIO
from roundtable.core.job_tables.transfer_table import TransferTable
from roundtable.core.observability.link_estimate import UNKNOWN_LINK, LinkEstimate, Rate
from roundtable.core.observability.transfer_figures import EncodingTrial, TransferFigures

HOLD = 2
"""Rounds for which a choice stays, unless it breaks `max_error`."""
_MANY = 1 << 20
_FIRST_RATIO = 0.1


@dataclass
class EncodingChoice:
    """What is remembered of one client.

    `encoding` was chosen in `round`, and `changed` is the round of the last change. `asked`: when the round
    that runs asked it. `lost`: the error that the encoding had in use, None before. `rest`: seconds of a
    round that are neither encoding nor the way up. `trials` by chain; `exceeded`: chains that lost more in
    use than they may, and how much. `elements`: values of an update.
    """

    encoding: str = ""
    round: int = 0
    changed: int = 0
    asked: float = 0.0
    lost: float | None = None
    link: LinkEstimate = UNKNOWN_LINK
    rest: Rate = field(default_factory=Rate)
    trials: dict[str, EncodingTrial] = field(default_factory=dict)
    exceeded: dict[str, float] = field(default_factory=dict)
    elements: int = 0
    ratio: float = _FIRST_RATIO

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> EncodingChoice:
        """What the snapshot holds of it."""
        values = dict(plain)
        values["link"] = LinkEstimate.from_plain(values["link"])
        values["rest"] = Rate(**values["rest"])
        values["trials"] = {name: EncodingTrial(**trial) for name, trial in values["trials"].items()}
        return cls(**values)

    def learn(self, table: TransferTable, figures: TransferFigures, cohort: int, now: float) -> None:
        """Takes in what the way of the client's update took."""
        before, self.link = self.link.up, self.link.after(figures)
        self.elements = figures.up_plain // 4
        on_the_way = (figures.up_seconds or 0.0) + (figures.encoding_seconds or 0.0)
        self.rest = self.rest.after_value(now - self.asked - on_the_way)
        for trial in figures.trials:
            if trial.encoding in table.chains:
                known = self.trials.get(trial.encoding, trial)
                seconds = (known.seconds + trial.seconds) / 2
                self.trials[trial.encoding] = EncodingTrial(trial.encoding, trial.size, seconds, trial.error)
        self.lost = figures.error if figures.error is not None else self.lost
        if figures.error is not None and _used(table, self.encoding, figures.error, cohort, lost=True) > 1.0:
            self.exceeded[self.encoding] = figures.error
        if figures.up_seconds and before.value:
            faster = figures.up / figures.up_seconds / before.value
            if faster > 1.0 + table.choice.gain:
                self.ratio = min(MOST_RATIO, 1.1 * self.ratio)
            elif faster < 1.0 / (1.0 + table.choice.gain):
                self.ratio = max(LEAST_RATIO, 0.9 * self.ratio)

    def decide(self, table: TransferTable, round: int, cohort: int) -> str:
        """Chooses for a round, once. Why another encoding is chosen than before; "" where it is the same."""
        if self.round == round:
            return ""
        self.round = round
        choose = self._by_time if table.choice.policy == "time" else self._by_bandwidth
        chosen, why = choose(table, cohort)
        if chosen == self.encoding:
            return ""
        self.encoding, self.changed, self.lost = chosen, round, None
        return why

    def _by_time(self, table: TransferTable, cohort: int) -> tuple[str, str]:
        used = {chain: self._used(table, chain, cohort) for chain in table.chains}
        kept = {chain: share for chain, share in used.items() if share <= 1.0}
        present, first = self.encoding, table.safe[0]
        if not present:
            return first, "nothing is measured yet: the shortest whose stated bound keeps max_error"
        broken = present not in kept
        if not self.link.up.weight or not self.elements:
            return (first, self._broken(present)) if broken else (present, "")
        times = {chain: self.seconds(chain) for chain in kept}
        least, gain = min(times.values()), table.choice.gain
        near = [chain for chain in times if times[chain] <= (1.0 + gain / 2) * least]
        best = min(near, key=lambda chain: (kept[chain], times[chain]))
        said = f"{times[best]:.2f} s a round with it at {self.link.up.value / 1e6:.2f} MB/s up"
        if broken:
            return best, f"{self._broken(present)}; {said}"
        if self.round - self.changed < HOLD:
            return present, ""
        if times[present] > (1.0 + gain) * least:
            return best, f"{said}, {times[present]:.2f} s with {present}"
        if kept[best] < 0.9 * kept[present]:
            return best, f"{said}, {times[present]:.2f} s with {present}, which loses more"
        return present, ""

    def seconds(self, chain: str) -> float:
        """The expected time of a round of this client with this encoding."""
        trial = self.trials.get(chain)
        size = trial.size if trial else get_encoding(chain).size_bound(_MANY) / _MANY
        work = trial.seconds if trial else 0.0
        return (
            self.rest.value + self.link.round_trip.value + self.elements * (size / self.link.up.value + work)
        )

    def _used(self, table: TransferTable, chain: str, cohort: int) -> float:
        """The share of `max_error` that an encoding is expected to use up; above 1 it may not be taken."""
        if chain in self.exceeded:
            return math.inf
        traits, trial = get_encoding(chain).traits, self.trials.get(chain)
        if traits.error == "exact":
            return 0.0
        if chain == self.encoding and self.lost is not None:
            return _used(table, chain, self.lost, cohort, lost=True)
        return _used(table, chain, trial.error if trial else traits.worst(_MANY), cohort)

    def _broken(self, chain: str) -> str:
        trial = self.trials.get(chain)
        lost = self.exceeded.get(chain, trial.error if trial else math.nan)
        return f"{chain} has lost {lost:.2f} of the update's norm, which is beyond max_error"

    def _by_bandwidth(self, table: TransferTable, cohort: int) -> tuple[str, str]:
        rate = self.link.up.value
        if not rate:
            return self.encoding or "float32", "nothing is measured yet"
        chosen = _band(table, rate, self.ratio)
        margin = 1.0 + table.choice.gain
        kinds = {_kind(_band(table, rate * factor, self.ratio)) for factor in (1.0 / margin, 1.0, margin)}
        if self.encoding and len(kinds) > 1 and _kind(self.encoding) in kinds:
            return self.encoding, ""
        return chosen, f"{rate / 1e6:.2f} MB/s up"


def _band(table: TransferTable, rate: float, ratio: float) -> str:
    under = table.choice.quantise_under
    if rate < under:
        bits = 16 if rate >= under / 2 else 8 if rate >= under / 4 else 4
        return f"minmax(bits={bits})"
    return f"topk(ratio={round(ratio, 4):g})" if rate > table.choice.sparsify_over else "float32"


def _kind(chain: str) -> str:
    return "topk" if chain.startswith("topk") else chain


def _used(table: TransferTable, chain: str, error: float, cohort: int, *, lost: bool = False) -> float:
    """The share of `max_error` behind a relative error of one update; with `lost`, as it was in use.

    With feedback what is remembered settles where e = ρ(1 + e), for ρ the error of one encoding: the worst
    case, in which all that was dropped adds up. The mean over n clients that draw for themselves has 1/√n of
    an unbiased error.
    """
    most, traits = table.choice.max_error, get_encoding(chain).traits
    if table.feeds(chain):
        remembered = error if lost else error / (1.0 - error) if error < 1.0 else math.inf
        return remembered / most.feedback
    if traits.error == "unbiased":
        shared = traits.support == "cohort"
        return error / math.sqrt(1 if shared else max(1, cohort)) / most.unbiased
    return error / most.biased
