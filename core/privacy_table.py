"""`[privacy]`: one table for each level, told apart by `level`; a key of another level is an error.

`level` says whose presence is hidden and who adds the noise. Code that treats levels differently matches
on these classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from roundtable.core.toml import TomlDocument, validate
from roundtable.core.toml_tables import Finite, Table, as_tuple

Accountant = Literal["pld", "rdp", "prv"]
ACCOUNTANTS: tuple[str, ...] = get_args(Accountant)
MOST_NOISE = 1e6
LEAST_DELTA = 1e-13
DROPOUT_TOLERANCE = 0.3
LARGEST_RING: Final = 32
QUANTILE, CLIP_LEARNING_RATE = 0.5, 0.2


def delta_fault(delta: float, population: int | None = None) -> str:
    """Why `delta` is none for so many units, as the end of a sentence that begins with it; "" if it is one.

    At 1 / population or above, publishing one unit in the clear would satisfy the definition.
    """
    if not 0.0 < delta < 1.0:
        return "it must be above 0 and below 1"
    if delta < LEAST_DELTA:
        return (
            f"below {LEAST_DELTA:g} the rounding of the accountants is larger than what they are asked for; "
            "choose a larger one"
        )
    if population is not None and delta * population >= 1.0:
        return (
            f"not below 1 / {population} = {1 / population:g}: publishing one unit in the clear would "
            f"satisfy it; choose at most {0.1 / population:.1g}"
        )
    return ""


def _bearable(noise_multiplier: float) -> float:
    if noise_multiplier > MOST_NOISE:
        raise ValueError(
            f"{noise_multiplier:g}: no model is left under so much noise, and no accountant can tell its "
            f"epsilon from 0; give at most {MOST_NOISE:g}"
        )
    return noise_multiplier


Positive = Annotated[Finite, Field(gt=0)]
Share = Annotated[Finite, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1, le=1 << 53)]
GroupSize = Annotated[int, Field(ge=3, le=1 << 16)]
Noise = Annotated[Positive, AfterValidator(_bearable)]

_GROUP_SIZE = "split the cohort into groups of at least so many silos, whose means a robust rule then sees"
_CORRUPTION = (
    "share of silos that may collude with the coordinator; default: 1/3 of up to 50 silos, 0.2 of more"
)
_DROPOUTS = "share of a cohort that may be lost"
_PUBLIC = "the silos' test data are public, so that metrics on them may leave"


@dataclass(frozen=True)
class Masking:
    """How updates are masked so that the coordinator sees sums alone (secure aggregation).

    `clip_norm` is None for sums of records, whose digits are masked as they are.
    """

    clip_norm: float | None
    group_size: int | None
    corruption: float | None
    dropout_tolerance: float
    ring_bits: int


def _check_mask_keys(table: NoPrivacy | ExampleLevel, keys: tuple[str, ...], more: str = "") -> None:
    """ValueError for keys of masks in a table that asks for none."""
    for key in keys:
        if not table.secure_aggregation and getattr(table, key) != type(table).model_fields[key].default:
            raise ValueError(
                f"{key} belongs to secure aggregation: set secure_aggregation = true, or leave it out{more}"
            )


class NoPrivacy(Table):
    """`[privacy]` without a guarantee; updates may still be hidden in securely aggregated sums."""

    level: Literal["none"] = Field("none", description="no differential privacy")
    secure_aggregation: bool = Field(
        False, description="mask updates, so that the coordinator sees their sum alone"
    )
    clip_norm: Positive | None = Field(
        None, description="largest L2 norm of a masked update; a first guess is the median norm of an update"
    )
    group_size: GroupSize | None = Field(None, description=_GROUP_SIZE)
    corruption: Share | None = Field(None, description=_CORRUPTION)
    dropout_tolerance: Share = Field(DROPOUT_TOLERANCE, description=_DROPOUTS)
    ring_bits: Literal[8, 12, 16, 32] = Field(
        LARGEST_RING,
        description="of a masked number; up to 16 the update is rotated before it is rounded, and weighs 1",
    )
    public_evaluation: bool = Field(False, description=_PUBLIC)

    @model_validator(mode="after")
    def _consistent(self) -> NoPrivacy:
        if self.secure_aggregation and self.clip_norm is None:
            raise ValueError(
                "clip_norm is missing: secure aggregation rounds updates of a bounded norm; a first guess is "
                "the median norm of an update"
            )
        keys = ("clip_norm", "group_size", "corruption", "dropout_tolerance", "ring_bits")
        _check_mask_keys(self, keys, "; a guarantee needs a level other than none")
        return self


class NoisyLevel(Table):
    """What every level with a guarantee says. `unit` is what is hidden: a client or an example."""

    unit: ClassVar[Literal["client", "example"]] = "client"

    level: str = Field(description="what is hidden, and by whom")
    epsilon: Positive | None = Field(
        None, description="budget of the whole job; the noise is solved from it where that is not given"
    )
    delta: float = Field(
        description="probability with which epsilon may fail: well below 1 / population, as 1e-5 for 1,000"
    )
    noise_multiplier: Noise | None = Field(
        None, description="standard deviation of the noise over clip_norm; instead of, or beside, epsilon"
    )
    clip_norm: Positive = Field(
        description="the most that one contribution counts (L2); a first guess is the median norm of an "
        "update, or of an example's gradient"
    )
    accountant: Accountant = Field("pld", description="how epsilon is computed: prv checks, rdp is looser")
    population: Count | None = Field(
        None, description="silos that delta protects, if more than there are; amplifies nothing"
    )
    public_evaluation: bool = Field(False, description=_PUBLIC)

    @field_validator("delta")
    @classmethod
    def _is_delta(cls, delta: float) -> float:
        if fault := delta_fault(delta):
            raise ValueError(f"{delta:g}: {fault}")
        return delta

    @model_validator(mode="after")
    def _bounded(self) -> NoisyLevel:
        if self.epsilon is None and self.noise_multiplier is None:
            raise ValueError(
                "epsilon and noise_multiplier are both missing: give the budget, the noise, or both"
            )
        if fault := delta_fault(self.delta, self.population):
            raise ValueError(f"delta = {self.delta:g}: {fault}")
        return self


class ClientLevel(NoisyLevel):
    """A whole silo is hidden; the coordinator adds Gaussian noise to the clipped sum (DP-FedAvg)."""

    level: Literal["client"] = Field(description="hides a silo; the coordinator adds the noise")
    clipping: Literal["flat", "adaptive", "per_layer"] = Field(
        "flat", description="one norm, one that follows a quantile, or one for each layer"
    )
    quantile: Annotated[Finite, Field(gt=0, lt=1)] = Field(
        QUANTILE, description="adaptive: of the updates' norms, which the clip norm follows"
    )
    clip_learning_rate: Positive = Field(
        CLIP_LEARNING_RATE, description="adaptive: how fast it follows (Andrew et al. 2021)"
    )
    cohorts: Literal["hidden", "known"] = Field(
        "hidden",
        description="hidden: nobody is told who takes part, and sampling amplifies; known: history and "
        "events name the silos, and every round is charged as if all took part",
    )

    @model_validator(mode="after")
    def _adaptive_keys(self) -> ClientLevel:
        changed = (self.quantile, self.clip_learning_rate) != (QUANTILE, CLIP_LEARNING_RATE)
        if changed and self.clipping != "adaptive":
            raise ValueError('quantile and clip_learning_rate belong to clipping = "adaptive"')
        return self


class ClientLocalLevel(NoisyLevel):
    """A whole silo is hidden from everybody; each silo adds its own Gaussian noise."""

    level: Literal["client_local"] = Field(description="hides a silo; each adds all of its noise itself")


class ExampleLevel(NoisyLevel):
    """One record inside a silo is hidden (DP-SGD at the silo, or noise on sums of its records).

    Sums of records may be masked besides: ε is that of the silo's own noise, whoever breaks the masks.
    """

    unit: ClassVar[Literal["client", "example"]] = "example"

    level: Literal["example"] = Field(description="hides a record; each silo trains by DP-SGD")
    population: Count | None = Field(None, description="examples of one silo, for `privacy plan`")
    batch_size: Count | None = Field(
        None, description="expected examples of a step; default: [algorithm] batch_size"
    )
    local_steps: Count | None = Field(None, description="steps a round; default: as [algorithm] says")
    secure_aggregation: bool = Field(
        False, description="of an analysis: mask the noisy sums, so that nobody sees those of a single silo"
    )
    corruption: Share | None = Field(None, description=_CORRUPTION)
    dropout_tolerance: Share = Field(DROPOUT_TOLERANCE, description=_DROPOUTS)

    @model_validator(mode="after")
    def _masked_keys(self) -> ExampleLevel:
        _check_mask_keys(self, ("corruption", "dropout_tolerance"))
        return self


class DistributedLevel(NoisyLevel):
    """A whole silo is hidden; each adds a share of discrete noise, and only the secure sum is private."""

    level: Literal["distributed"] = Field(
        description="hides a silo; each adds a share of the noise under secure aggregation"
    )
    mechanism: Literal["skellam", "discrete_gaussian"] = Field("skellam", description="the discrete noise")
    bits: Annotated[int, Field(ge=8, le=32)] = Field(24, description="of a masked number; 20 to 24 as a rule")
    group_size: GroupSize | None = Field(None, description=_GROUP_SIZE)
    corruption: Share | None = Field(None, description=_CORRUPTION)
    dropout_tolerance: Share = Field(DROPOUT_TOLERANCE, description=_DROPOUTS)


MOST_COEFFICIENTS, MOST_BUFFERS = 1 << 14, 16
Coefficients = Annotated[
    tuple[Annotated[Finite, Field(ge=0, le=1)], ...],
    BeforeValidator(as_tuple),
    Field(min_length=1, max_length=MOST_COEFFICIENTS),
]


class FtrlLevel(NoisyLevel):
    """A whole silo is hidden by noise correlated over rounds (DP-FTRL); with known cohorts no trust is placed
    in the sampling."""

    level: Literal["dp_ftrl"] = Field(description="hides a silo by noise correlated over rounds")
    bands: Annotated[int, Field(ge=1, le=MOST_COEFFICIENTS)] | None = Field(
        None,
        description="banded noise: so many rounds are correlated, and the coordinator keeps one noise fewer; "
        "without bands and buffers the plan takes what has less noise",
    )
    buffers: Annotated[int, Field(ge=1, le=MOST_BUFFERS)] | None = Field(
        None, description="BLT noise: all rounds are correlated by so many sums that the coordinator keeps"
    )
    coefficients: Coefficients | None = Field(
        None,
        description="of C, instead of optimised ones: its first column from 1 on; with decays, each buffer's "
        "weight",
    )
    decays: Coefficients | None = Field(
        None, description="BLT noise: of each buffer, beside its weight in coefficients"
    )
    separation: Count | None = Field(
        None,
        description="rounds from one contribution of a silo to its next; default: population / cohort. With "
        "hidden cohorts the silos are divided into so many groups, which take turns",
    )
    cohorts: Literal["known", "hidden"] = Field(
        "known",
        description="known: every silo rests for the separation; hidden: each round draws from one group by "
        "Poisson sampling, which amplifies banded noise, and nobody is told who takes part",
    )

    @model_validator(mode="after")
    def _one_factorisation(self) -> FtrlLevel:
        given = [key for key in ("bands", "buffers", "coefficients") if getattr(self, key) is not None]
        if len(given) > 1:
            raise ValueError(
                f"{' and '.join(given)} each name how noise is correlated: leave out all but one of them"
            )
        if self.decays is not None and len(self.decays) != len(self.coefficients or ()):
            raise ValueError(
                f"{len(self.decays)} decays and {len(self.coefficients or ())} coefficients: with decays, "
                "coefficients hold one weight for each buffer"
            )
        if self.decays is not None and len(self.decays) > MOST_BUFFERS:
            raise ValueError(f"decays: at most {MOST_BUFFERS} buffers are kept")
        return self

    @model_validator(mode="after")
    def _amplified(self) -> FtrlLevel:
        if self.cohorts == "known":
            return self
        if self.separation is None:
            raise ValueError(
                'separation is missing: with cohorts = "hidden" it says into how many groups the silos are '
                "divided"
            )
        if self.buffers is not None or self.decays is not None:
            raise ValueError(
                'cohorts = "hidden": sampling is only proven to amplify banded noise, and BLT noise '
                "correlates all rounds; give bands, or leave it out"
            )
        bands = self.bands or len(self.coefficients or ())
        if bands > self.separation:
            raise ValueError(
                f'cohorts = "hidden": {bands} bands reach over more than separation = {self.separation} '
                "rounds, and sampling would amplify nothing; give at most as many bands"
            )
        return self


Private = ClientLevel | ClientLocalLevel | ExampleLevel | DistributedLevel | FtrlLevel
Privacy = Annotated[NoPrivacy | Private, Field(discriminator="level")]
BareUpdates = ClientLevel | FtrlLevel
"""Levels at which the coordinator sees updates without noise: an exact function of one, such as its digest or
its example count, tells others whether a silo took part and with what, since training can be repeated."""
OwnNoise = ExampleLevel | ClientLocalLevel
"""Levels at which the silo makes its update private itself."""
Accounted = OwnNoise | DistributedLevel
"""Levels at which the silo keeps an account: at the others its bare update leaves it."""


def has_secret_cohorts(privacy: NoPrivacy | Private) -> bool:
    """Whether the guarantee rests on nobody being told who was drawn."""
    return isinstance(privacy, ClientLevel | FtrlLevel) and privacy.cohorts == "hidden"


def groups_of(privacy: NoPrivacy | Private) -> int:
    """Into how many groups, which take turns in the rounds, the job's silos are divided; 1 for undivided."""
    match privacy:
        case FtrlLevel(cohorts="hidden", separation=int(groups)):
            return groups
        case _:
            return 1


def masking_of(privacy: NoPrivacy | Private) -> Masking | None:
    """The job's secure aggregation; None where updates travel in the clear, or with noise of their own."""
    match privacy:
        case (
            DistributedLevel(clip_norm=norm, bits=bits)
            | NoPrivacy(secure_aggregation=True, clip_norm=float(norm), ring_bits=bits)
        ):
            return Masking(norm, privacy.group_size, privacy.corruption, privacy.dropout_tolerance, bits)
        case ExampleLevel(secure_aggregation=True):
            return Masking(None, None, privacy.corruption, privacy.dropout_tolerance, LARGEST_RING)
        case _:
            return None


def bound_of(privacy: NoPrivacy | Private) -> float | None:
    """The norm to which every update is clipped as a whole; None where none is, or it is not known before."""
    match privacy:
        case ClientLevel(clipping="flat") | FtrlLevel() | ClientLocalLevel() | DistributedLevel():
            return privacy.clip_norm
        case NoPrivacy(secure_aggregation=True):
            return privacy.clip_norm
        case _:
            return None


def hides_figures(privacy: NoPrivacy | Private) -> bool:
    """Whether a silo's own losses and counts must not be seen beside what it sends."""
    return not isinstance(privacy, NoPrivacy) or privacy.secure_aggregation


def levels_of(unit: str) -> tuple[str, ...]:
    """The levels that hide a `client`, or an `example`."""
    tables: tuple[type[Private], ...] = get_args(Private)
    return tuple(level for table in tables if table.unit == unit for level in _names(table))


def privacy_from(table: Mapping[str, Any], source: str = "job") -> NoPrivacy | Private:
    """The `[privacy]` table that these values make. Raises ConfigError, naming the key."""
    return validate(_Whole, TomlDocument({"privacy": dict(table)}, source, "")).privacy


class _Whole(Table):
    privacy: Privacy


def _names(table: type[Table]) -> tuple[str, ...]:
    names: tuple[str, ...] = get_args(table.model_fields["level"].annotation)
    return names
