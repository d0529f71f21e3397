"""Which silos analyses were summed over: two of a column, over almost the same silos, tell of the others.

What is compared is the column, whatever was asked of it: another grid, another title or a further question
beside it makes the same sums again. Within one job the ledger's rules on its models hold.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from roundtable.client.policy.analysis_rules import AskedColumns
from roundtable.core.errors import ProtocolError


@dataclass
class AskedCohorts:
    """The cohorts of each (table, column), with the job that each was for."""

    cohorts: dict[tuple[str, str], set[tuple[str, frozenset[str]]]] = field(default_factory=dict)

    def check(self, asked: AskedColumns, job: str, silos: Iterable[str]) -> None:
        """ProtocolError where another job's sums of one of the columns are over almost these silos."""
        here = frozenset(silos)
        for column in asked.columns:
            for other, before in self.cohorts.get((asked.table, column), ()):
                apart = here ^ before
                if other != job and 0 < len(apart) < asked.apart:
                    raise ProtocolError(
                        f"another analysis used column {column!r} of table {asked.table!r}, and its silos "
                        f"differ from these by {', '.join(sorted(apart))} alone: the difference of the two "
                        f"would tell of so few; ask the same silos again, or others that differ by at least "
                        f"{asked.apart} ([policy.analyses] silos_apart)"
                    )

    def add(self, asked: AskedColumns, job: str, silos: Iterable[str]) -> None:
        """A sum over these silos may be seen."""
        here = job, frozenset(silos)
        for column in asked.columns:
            self.cohorts.setdefault((asked.table, column), set()).add(here)
