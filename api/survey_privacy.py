"""A survey under differential privacy: what its file says, and what it will cost before anybody is asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, field_validator

from roundtable.core.analyses.noisy.noisy_question import NoisyQuestion
from roundtable.core.analyses.survey import Survey
from roundtable.core.config import JobConfig
from roundtable.core.privacy_table import ExampleLevel, delta_fault
from roundtable.core.toml_tables import Finite, Table
from roundtable.privacy import compose, solve_noise, sums_charge

LEVEL = "example"
LOCAL = "local"
RELATION = "add_remove"
DELTA = 1e-6
_OTHER_LEVELS = {
    "client": "it hides a whole silo, and noise as large as all rows of a silo leaves nothing",
    "dp_ftrl": "it correlates noise over rounds, and a survey under privacy has one",
    "distributed": "it hides a whole silo by shares of noise; masks go with each silo's own noise, by "
    "secure_aggregation = true beside [privacy]",
    "client_local": "it hides a whole silo, and noise as large as all rows of a silo leaves nothing",
}


def _known_level(level: Any) -> Any:
    if level != LEVEL:
        why = _OTHER_LEVELS.get(str(level), "there is no such level")
        raise ValueError(
            f'{level!r}: {why}. Surveys have level = "example": each silo hides each of its rows'
        )
    return level


def _known_noise(noise: Any) -> Any:
    if noise == "distributed":
        raise ValueError(
            "'distributed': the accountant bounds shares of noise for vectors whose norm is clipped and "
            "checked behind random rounding (Kairouz, Liu & Steinke 2021, section 4.2). A silo's sums have "
            "no such norm: only how far one row moves them is bounded, and two neighbouring tables rounded "
            "so have no proven distance; and the sum of each digit, in which numbers travel, tells more than "
            "the sum that they make. Leave noise out: each silo adds all that hides its rows"
        )
    if noise != LOCAL:
        raise ValueError(
            f'{noise!r}: noise = "local" is what there is: each silo adds all that hides its rows'
        )
    return noise


class SurveyPrivacyTable(Table):
    """`[privacy]` of a survey: one row more or less in a silo's table is hidden, by noise that the silo adds
    to its sums itself."""

    level: Annotated[str, BeforeValidator(_known_level)] = Field(
        LEVEL, description="example: each silo hides each row by noise of its own"
    )
    epsilon: Finite = Field(gt=0, le=20, description="what the whole survey costs each silo's rows")
    delta: Finite = Field(
        DELTA, le=1e-3, description="probability with which epsilon may fail: well below 1 / rows"
    )

    noise: Annotated[str, BeforeValidator(_known_noise)] = Field(
        LOCAL, description="local: each silo adds all the noise that hides its rows, before masks"
    )

    @field_validator("delta")
    @classmethod
    def _is_delta(cls, delta: float) -> float:
        if fault := delta_fault(delta):
            raise ValueError(f"{delta:g}: {fault}")
        return delta

    @property
    def noise_multiplier(self) -> float:
        """The least noise with which the survey costs no more than epsilon."""
        return solve_noise(sums_charge(1.0), self.epsilon, self.delta).noise_multiplier


@dataclass(frozen=True)
class QuestionCost:
    """What a question costs alone, and the noise of each silo on each block: standard deviations, of counts
    and of sums of columns scaled to [-1, 1]."""

    title: str
    ask: str
    epsilon: float
    noise: Mapping[str, float]


@dataclass(frozen=True)
class SurveyPlan:
    """What a survey costs each silo's rows, in so many rounds. Questions share one mechanism, so that their
    costs add up to less than their sum. `masked`: nobody sees the noisy sums of a single silo."""

    epsilon: float
    delta: float
    noise_multiplier: float
    rounds: int
    questions: tuple[QuestionCost, ...]
    masked: bool = False

    @property
    def trust(self) -> str:
        """Whom the guarantee rests on, and what masks add to it, in words."""
        own = "each silo adds all the noise that hides its rows before anything leaves it, and trusts nobody"
        if not self.masked:
            return f"{own}; the coordinator sees each silo's noisy sums"
        return (
            f"{own}; its noisy sums are masked besides, so that the coordinator sees their total alone while "
            "secure aggregation holds. The epsilon does not rest on the masks, nor on who else is honest"
        )

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        questions = [
            {"title": each.title, "ask": each.ask, "epsilon": each.epsilon, "noise": dict(each.noise)}
            for each in self.questions
        ]
        return {
            "level": LEVEL,
            "relation": RELATION,
            "epsilon": self.epsilon,
            "delta": self.delta,
            "noise_multiplier": self.noise_multiplier,
            "rounds": self.rounds,
            "noise": LOCAL,
            "secure_aggregation": self.masked,
            "trust": self.trust,
            "questions": questions,
        }


def cost_of(survey: Survey, table: SurveyPrivacyTable, masked: bool) -> SurveyPlan:
    """The plan of a survey that was made with the table's noise."""
    noise, costs = table.noise_multiplier, []
    for question, share in zip(survey.questions, survey.shares or (), strict=True):
        assert isinstance(question, NoisyQuestion)
        alone = compose([sums_charge(noise / share**0.5)], table.delta)
        blocks: dict[str, float] = {}
        for name in question.blocks:
            blocks[name.rstrip("0123456789")] = question.spread(name)
        costs.append(QuestionCost(question.title, question.ask, alone, blocks))
    whole = compose([sums_charge(noise)], table.delta)
    return SurveyPlan(whole, table.delta, noise, survey.rounds, tuple(costs), masked)


def privacy_of(job: JobConfig, guarantee: bool) -> dict[str, Any] | None:
    """What is told of an analysis's privacy beside its answers; None where it has none."""
    privacy = job.privacy
    if not job.releases_sums or not isinstance(privacy, ExampleLevel) or privacy.noise_multiplier is None:
        return None
    charge = sums_charge(privacy.noise_multiplier)
    return {
        "level": privacy.level,
        "relation": charge.relation,
        "epsilon": compose([charge], privacy.delta, privacy.accountant),
        "delta": privacy.delta,
        "noise_multiplier": privacy.noise_multiplier,
        "guarantee": guarantee,
    }
