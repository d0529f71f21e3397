"""What the way of one update took: bytes with and without encoding, seconds, and what the encoding lost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class EncodingTrial:
    """What an encoding would make of a client's update, from a sample of it: bytes a value, seconds a value
    of encoding and decoding, and ‖a − C(a)‖ / ‖a‖."""

    encoding: str
    size: float
    seconds: float
    error: float


@dataclass(frozen=True)
class Writing:
    """How a client wrote its update: seconds of encoding, and error = ‖a − C(a)‖ / ‖Δ‖ of the update Δ, with
    a = Δ and what error feedback remembered. None where Δ is zero or it is not known. `trials` are of the
    encodings that may be chosen, where they may."""

    seconds: float
    error: float | None = None
    trials: tuple[EncodingTrial, ...] = ()

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Writing:
        """What `asdict` has put into JSON."""
        return cls(plain["seconds"], plain["error"], tuple(EncodingTrial(**each) for each in plain["trials"]))


class ModelArrival(NamedTuple):
    """Bytes of models that a silo has received for a job since its last update, and in how many seconds."""

    size: int = 0
    seconds: float = 0.0


NOTHING_CAME = ModelArrival()


@dataclass(frozen=True)
class TransferFigures:
    """Bytes of an update on the way up, and of models on the way down since the client's update before.

    `up_plain` and `down_plain`: what float32 values and the whole model take; 0 down where nothing was sent.
    `encoding` is the chain where it was chosen for the client, otherwise "". Seconds and error are None where
    they are not known, or may not be told.
    """

    up: int
    up_plain: int
    down: int = 0
    down_plain: int = 0
    up_seconds: float | None = None
    down_seconds: float | None = None
    encoding_seconds: float | None = None
    decoding_seconds: float | None = None
    error: float | None = None
    encoding: str = ""
    trials: tuple[EncodingTrial, ...] = ()

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> TransferFigures:
        """What `asdict` has put into JSON."""
        return cls(**{**plain, "trials": tuple(EncodingTrial(**each) for each in plain["trials"])})

    def known(self) -> dict[str, Any]:
        """The values that there are, by name, but for the trials."""
        plain = {**vars(self), "trials": None}
        return {name: value for name, value in plain.items() if value not in (None, "")}


class TransferSums(NamedTuple):
    """What updates of one round or of several took together; errors and seconds over those that tell them."""

    updates: int
    up: int
    up_plain: int
    down: int
    down_plain: int
    encoding_seconds: float
    decoding_seconds: float
    error: float | None

    @classmethod
    def of(cls, transfers: Iterable[Mapping[str, Any]]) -> TransferSums:
        """The sums over what `TransferFigures.known` gave; `error` is the mean."""
        every = list(transfers)
        errors = [each["error"] for each in every if "error" in each]

        def total(name: str) -> Any:
            return sum(each.get(name, 0) for each in every)

        return cls(
            len(every),
            total("up"),
            total("up_plain"),
            total("down"),
            total("down_plain"),
            float(total("encoding_seconds")),
            float(total("decoding_seconds")),
            sum(errors) / len(errors) if errors else None,
        )

    @property
    def up_ratio(self) -> float | None:
        """How many times smaller the updates were; None where nothing is known of them."""
        return self.up_plain / self.up if self.up and self.up_plain else None

    @property
    def down_ratio(self) -> float | None:
        """How many times smaller what was sent of models was."""
        return self.down_plain / self.down if self.down and self.down_plain else None
