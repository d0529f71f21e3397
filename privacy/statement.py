"""The guarantee in words for the provenance of a model: what is hidden, from whom, and on what it rests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from roundtable.core.privacy_table import ClientLevel, DistributedLevel, FtrlLevel, Private
from roundtable.privacy.accounting.charge import Charge
from roundtable.privacy.accounting.ledger import Spent

_UNIT = {
    "client": "all data of any one participating organisation (silo)",
    "example": "any one record held by a participating organisation (silo)",
}
_RELATION = {
    "add_remove": "had {unit} been absent instead of present, or present instead of absent",
    "replace_one": "had {unit} been replaced by any other data",
}
DRAWN_SILOS = (
    "A silo's account is charged for each round in which it trains, whole. That silos are drawn makes such a "
    "round no cheaper, against anybody: whether a silo has trained can show in the model."
)
"""At level `example`, why the draw of silos amplifies nothing (`accounting.drawn_silos`)."""

_TRUST = {
    "client": (
        "The coordinator sees each silo's update and is trusted not to reveal it; it clips it and adds the "
        "noise. The guarantee covers everyone who sees the published models, records and events, other "
        "silos among them. It does not cover those who run the coordinator's machine, or a relay that "
        "silos come by, which sees theirs and which of them were drawn."
    ),
    "dp_ftrl": (
        "The coordinator sees each silo's update and clips it, keeps the noise of earlier rounds secret, and "
        "enforces the minimum number of rounds between two participations of a silo. It does not cover "
        "those who run its machine, or a relay that silos come by."
    ),
    "client_local": (
        "Each silo adds the noise before anything leaves it. Nobody else is trusted: the guarantee "
        "covers the "
        "coordinator and the other silos as well."
    ),
    "distributed": (
        "Each silo adds a share of the noise and the shares and updates are summed under secure "
        "aggregation. The "
        "coordinator is not trusted with any silo's update; it is relied upon that at least as many "
        "honest silos as "
        "planned finish each round, and that the secure aggregation is not broken."
    ),
    "example": (
        "Each silo adds the noise to its own training, or to the sums that it releases, before anything "
        "leaves it. No other party is trusted. The "
        "guarantee is each silo's own and covers its records, as many as they are: it does not hide that the "
        "silo took part, nor how many records it has, from which its sampling rate, steps and noise follow. "
        f"{DRAWN_SILOS}"
    ),
}

_NO_GUARANTEE = (
    "NO GUARANTEE: the noise came from a seeded generator, as simulations do, and could be reproduced by "
    "anyone who knows the seed. The figures below describe what a real run with the same settings would have."
)
_NOT_COVERED = (
    "What it does not cover: facts about the whole population that the model is meant to learn, other uses "
    "of the same data outside this ledger, and figures published from the data without noise."
)
_SAMPLED = {
    "poisson": "The figure relies on each participant of a round being drawn by a secret coin of its own.",
    "fixed_size": "The figure relies on the participants of a round being drawn secretly, all sets alike.",
}


def statement(privacy: Private, spent: Spent, sampling: str = "", guarantee: bool = True) -> str:
    """A paragraph in plain words. `sampling` is `SamplingModel.sentence`.

    `guarantee` is False where the noise could be repeated (simulation): the text then begins by saying
    that nothing is guaranteed.
    """
    parts = [] if guarantee else [_NO_GUARANTEE]
    parts += [*_figures(spent, _UNIT[privacy.unit]), _TRUST[privacy.level]]
    match privacy:
        case ClientLevel() | FtrlLevel(cohorts="hidden") if sampling:
            parts.append(sampling)
        case FtrlLevel(cohorts="known"):
            parts.append("No trust is placed in how silos are sampled.")
        case DistributedLevel():
            parts.append(
                "No amplification by sampling is claimed, since the coordinator knows who takes part."
            )
        case _:
            pass
    return " ".join([*parts, _NOT_COVERED])


def account_statement(
    spent: Spent, levels: Iterable[str], charges: Sequence[Charge], silo: str | None = None
) -> str:
    """The same about an account that jobs of several `levels` have charged; with `silo`, about that one."""
    unit = _UNIT[charges[0].unit if charges else "client"]
    if silo:
        what = "any one record" if charges and charges[0].unit == "example" else "all data"
        unit = f"{what} of the silo {silo}"
    if not charges:
        return f"Nothing has been released yet that depends on {unit}."
    sampling = sorted({_SAMPLED[charge.sampling] for charge in charges if charge.sampling != "none"})
    trust = [_TRUST[level] for level in sorted(set(levels)) if level in _TRUST]
    return " ".join([*_figures(spent, unit), *trust, *sampling, _NOT_COVERED])


def _figures(spent: Spent, unit: str) -> list[str]:
    return [
        f"Privacy spent: epsilon = {spent.epsilon:.3f} at delta = {spent.delta:g} (differential privacy), "
        f"over {_count(spent.releases, 'release')} of {_count(len(spent.jobs), 'job')} that used this data.",
        f"What it means: {_RELATION[spent.relation].format(unit=unit)}, any outcome published would have "
        f"been at most {_times(spent.epsilon)} times as likely as it was, or as unlikely, up to a "
        f"probability of {spent.delta:g} in which this may fail. Whoever studies the results can therefore "
        "learn little about that unit that could not be learnt without it.",
    ]


def _times(epsilon: float) -> str:
    return f"{2.718281828459045**epsilon:,.3g}" if epsilon < 20.0 else "an unusably large number of"


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}" + ("" if number == 1 else "s")
