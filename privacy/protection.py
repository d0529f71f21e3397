"""Against whom a job's ε holds, and on what assumption: a line for each party, at each level."""

from __future__ import annotations

from dataclasses import dataclass

from roundtable.core.config import JobConfig
from roundtable.core.privacy_table import (
    ClientLevel,
    ClientLocalLevel,
    DistributedLevel,
    ExampleLevel,
    FtrlLevel,
    NoPrivacy,
    Private,
)


@dataclass(frozen=True)
class HoldsAgainst:
    """Whether ε holds against `party`, and what it rests on; without `holds`, what the party sees."""

    party: str
    holds: bool
    assumption: str


PUBLIC = "whoever sees models, records and events"
SILO = "another silo of the job"
SILOS = "silos that collude"
MACHINE = "who runs the coordinator's machine"
RELAY = "who runs a relay that silos come by"

_EVERYBODY = (PUBLIC, SILO, SILOS, MACHINE, RELAY)
_BARE = "it sees each silo's update as it was sent, and who was drawn"
_BEHIND = "it sees the updates of the silos behind it as they were sent, and which of them were drawn"
_HONEST = "the coordinator adds the noise as it says, and keeps updates and noise to itself"
_SECRET = f"{_HONEST}, and tells nobody who was drawn, nor does the time at which rounds end"
_APART = f"{_HONEST}, and holds silos to the separation"
_SHARES = "as many honest silos as planned finish each round, and secure aggregation is not broken"
_OWN = "none: each silo adds all of the noise before anything leaves it"
_EXAMPLES = f"{_OWN}, and is charged for every round in which it trains, whoever knows that it was drawn"


def protection(privacy: NoPrivacy | Private) -> tuple[HoldsAgainst, ...]:
    """The lines of a level; without one, ε holds against nobody."""
    match privacy:
        case ClientLevel(cohorts="hidden") | FtrlLevel(cohorts="hidden"):
            rest = (PUBLIC, _SECRET), (SILO, _SECRET)
            together = (
                f"{_SECRET}; silos know which of themselves were drawn: under Poisson sampling that tells "
                "nothing of others, of m out of n silos it makes the rate against k of them m / (n - k)"
            )
            return _lines((*rest, (SILOS, together)))
        case ClientLevel():
            return _lines(_same(_HONEST))
        case FtrlLevel():
            return _lines(_same(_APART))
        case DistributedLevel():
            collude = f"{_SHARES}; no more silos collude than privacy.corruption says"
            found = (PUBLIC, _SHARES), (SILO, _SHARES), (SILOS, collude), (MACHINE, collude), (RELAY, collude)
            return tuple(HoldsAgainst(party, True, rests) for party, rests in found)
        case ClientLocalLevel() | ExampleLevel():
            rests = _EXAMPLES if isinstance(privacy, ExampleLevel) else _OWN
            return tuple(HoldsAgainst(party, True, rests) for party in _EVERYBODY)
        case NoPrivacy():
            sees = (
                "sums of the cohort" if privacy.secure_aggregation else "models that remember what they like"
            )
            return tuple(HoldsAgainst(party, False, sees) for party in _EVERYBODY)


def hidden(job: JobConfig) -> str:
    """What ε is about, in words."""
    # Another strategy asks another silo in the place of one that is not there, and everybody may know that.
    by_chance = job.cohort.strategy in ("poisson", "uniform")
    match job.privacy:
        case NoPrivacy():
            return "nothing"
        case ExampleLevel():
            return "any one record of a silo; not that the silo takes part, nor how many records it has"
        case ClientLevel(cohorts="hidden") | FtrlLevel(cohorts="hidden") if by_chance:
            return "all data of any one silo, and that it takes part"
        case _:
            return "all data of any one silo; not that it takes part"


def people(privacy: NoPrivacy | Private) -> str:
    """What ε leaves of a person who is not one unit, in words."""
    match privacy:
        case NoPrivacy():
            return "nobody is hidden"
        case ExampleLevel():
            return (
                "the unit is a record, not a person: more can be learnt of somebody with several records in "
                "a silo; records at several silos are in accounts of their own, which add up"
            )
        case _:
            return (
                "the unit is a silo, not a person: somebody with data at one silo is hidden with it; more "
                "can be learnt of somebody with data at several"
            )


def _same(rests: str) -> tuple[tuple[str, str], ...]:
    return tuple((party, rests) for party in (PUBLIC, SILO, SILOS))


def _lines(held: tuple[tuple[str, str], ...]) -> tuple[HoldsAgainst, ...]:
    """At levels at which updates leave a silo bare."""
    lines = [HoldsAgainst(party, True, rests) for party, rests in held]
    return (*lines, HoldsAgainst(MACHINE, False, _BARE), HoldsAgainst(RELAY, False, _BEHIND))
