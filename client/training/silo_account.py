"""What a silo's own data has spent, over all jobs: charged, durably, before anything leaves.

A crash after the charge costs privacy that was not spent; one before it sent nothing. Work that is
done again draws new noise and is charged again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from roundtable.client.durable_files import replace_synced
from roundtable.core.errors import PrivacyError
from roundtable.core.machine.file_locks import lock_file
from roundtable.core.privacy_table import Private
from roundtable.privacy import Budget, Charge
from roundtable.privacy.example_level import SiloAccount, Sources, secure_sources

Payment = Callable[[Private, Charge], None]


class EarlierRelease(Protocol):
    """Where a step keeps what it has released of the silo's records."""

    def load(self, size: int, about: bytes) -> npt.NDArray[np.float64] | None:
        """What was released before, float64 [size], when it was asked about the same; None for nothing."""

    def keep(self, released: npt.NDArray[np.float64], about: bytes) -> None:
        """Keeps it, durably."""


@dataclass
class Protection:
    """What a silo needs to make an update private itself.

    `pay` charges the silo's account, `sources` give the noise, and `mode` is how per-example gradients
    are made: training replaces "auto" by what it found, for the job's next round. `release` keeps sums that
    have their noise, for whoever asks again; None where nobody does.
    """

    pay: Payment
    sources: Sources = secure_sources
    mode: str = "auto"
    release: EarlierRelease | None = None


_WHOSE = "this silo's data"


def payment(
    folder: Path, job: str, round: int, attempt: int, epsilon: float | None, delta: float | None
) -> Payment:
    """Pays for one step from the account in `folder`; `epsilon` at `delta` is the silo's own limit.

    What it gives raises BudgetExceeded where the job's budget or the silo's own does not hold the charge.
    """

    def pay(privacy: Private, charge: Charge) -> None:
        path = folder / f"{charge.unit}.json"
        folder.mkdir(parents=True, exist_ok=True)
        with in_turn(folder):
            account = _within(path, privacy, charge, epsilon, delta)
            name = job
            while any((e.job, e.round, e.attempt) == (name, round, attempt) for e in account.entries):
                name += " (again)"
            account = account.charged(name, round, attempt, charge)
            replace_synced(path, [account.to_json().encode()])

    return pay


@contextmanager
def in_turn(folder: Path) -> Iterator[None]:
    """One charge at a time: the agent charges masked sums, its training process everything else."""
    with (folder / ".lock").open("w") as file:
        lock_file(file.fileno(), wait=True)
        yield


def affordable(folder: Path, epsilon: float | None, delta: float | None) -> Payment:
    """As `payment`, but nothing is charged: whether a charge would be refused, before work for it begins."""

    def check(privacy: Private, charge: Charge) -> None:
        path = folder / f"{charge.unit}.json"
        _within(path, privacy, charge, epsilon, delta).check(charge)

    return check


def kept_accounts(folder: Path) -> dict[str, SiloAccount]:
    """The silo's accounts by unit, under the budget of the newest job. PrivacyError where one is damaged."""
    try:
        texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.json"))}
    except OSError as error:
        raise PrivacyError(f"this silo's privacy account cannot be read ({error.strerror})") from error
    return {unit: SiloAccount.from_json(text) for unit, text in texts.items()}


def _within(
    path: Path, privacy: Private, charge: Charge, epsilon: float | None, delta: float | None
) -> SiloAccount:
    """The account under the job's budget, once the silo's own limit holds the charge."""
    budget = Budget(_WHOSE, privacy.epsilon or math.inf, privacy.delta, privacy.accountant)
    account = _read(path, budget)
    if epsilon is not None:
        own = Budget(_WHOSE, epsilon, delta or privacy.delta, privacy.accountant)
        replace(account, budget=own).check(charge)
    return account


def _read(path: Path, budget: Budget) -> SiloAccount:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return SiloAccount(budget)
    except OSError as error:
        raise PrivacyError(f"this silo's privacy account cannot be read ({error.strerror})") from error
    return replace(SiloAccount.from_json(text), budget=budget)
