"""How the doctor asks: one probe after the other, each for a bounded time, whatever becomes of the others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from roundtable.core.errors import RoundtableError

PATIENCE_SECONDS = 30.0


@dataclass(frozen=True)
class Check:
    """One line of the report. `remedy` is the command that mends it, or what to write where."""

    name: str
    state: Literal["ok", "skipped", "warn", "fail"]
    message: str
    remedy: str = ""


@dataclass(frozen=True)
class Inquiry:
    """Something to ask. `run` may block; what it raises as a RoundtableError is a failure with `remedy`.

    `about` says in a few words what is tried, for who waits. Where it takes longer than `seconds` that is the
    answer: its thread is left to itself, and ends with the process.
    """

    name: str
    run: Callable[[], Iterable[Check]]
    about: str = ""
    remedy: str = ""
    seconds: float = PATIENCE_SECONDS

    def answer(self) -> list[Check]:
        """What comes of it; a mistake in a check of ours is raised as it is."""
        answers: list[Check] = []
        raised: list[BaseException] = []
        asking = threading.Thread(target=self._ask, args=(answers, raised), name=self.name, daemon=True)
        asking.start()
        asking.join(self.seconds)
        if asking.is_alive():
            late = f"no answer within {self.seconds:g} s"
            # What was found before it stuck holds.
            return [*answers, Check(self.name, "fail", f"{self.about or self.name}: {late}", self.remedy)]
        if raised and not isinstance(raised[0], RoundtableError):
            raise raised[0]
        return [*answers, *(Check(self.name, "fail", str(error), self.remedy) for error in raised)]

    def _ask(self, answers: list[Check], raised: list[BaseException]) -> None:
        try:
            for check in self.run():
                answers.append(check)
        except BaseException as error:  # noqa: BLE001 - raised again where the answer is waited for
            raised.append(error)


def known(check: Check) -> Inquiry:
    """A probe whose answer is known already."""
    return Inquiry(check.name, lambda: [check])


def answers(probes: Iterable[Inquiry]) -> Iterator[Check]:
    """The answers of all probes, in their order."""
    for probe in probes:
        yield from probe.answer()
