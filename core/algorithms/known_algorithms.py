"""From a job's `[algorithm]` table to the algorithm: built in, installed, or a file beside the job."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    ConfigDict,
    SerializeAsAny,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    WrapValidator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from roundtable.core.algorithms.analysis import Analysis
from roundtable.core.algorithms.contract import ClientAlgorithm
from roundtable.core.algorithms.cyclic import Cyclic
from roundtable.core.algorithms.factors.flexlora import FlexLora
from roundtable.core.algorithms.factors.flora import Flora
from roundtable.core.algorithms.factors.hetlora import HetLora
from roundtable.core.algorithms.fedavg import FedAvg
from roundtable.core.algorithms.feddyn import FedDyn
from roundtable.core.algorithms.fedexp import FedExp
from roundtable.core.algorithms.fednova import FedNova
from roundtable.core.algorithms.fedprox import FedProx
from roundtable.core.algorithms.fedsam import FedSam
from roundtable.core.algorithms.moon import Moon
from roundtable.core.algorithms.personal.apfl import Apfl
from roundtable.core.algorithms.personal.ditto import Ditto
from roundtable.core.algorithms.personal.fedrep import FedRep
from roundtable.core.algorithms.personal.partial_models import FedBn, FedPer, LgFedAvg
from roundtable.core.algorithms.personal.pfedme import PFedMe
from roundtable.core.algorithms.personal.tuned_models import FedBabu, FineTuning, PerFedAvg
from roundtable.core.algorithms.pretraining.eager import Eager
from roundtable.core.algorithms.pretraining.streaming import Streaming
from roundtable.core.algorithms.qfedavg import QFedAvg
from roundtable.core.algorithms.scaffold import Scaffold
from roundtable.core.algorithms.table import AlgorithmTable
from roundtable.core.errors import ConfigError
from roundtable.core.plugins.calls import check_methods, place_of
from roundtable.core.plugins.doors import is_file, resolve
from roundtable.core.toml_tables import Open

ENTRY_POINTS = "roundtable.algorithms"
FOLDER = "folder"
"""Key of pydantic's context under which the folder of the job's file is found."""

_HOOKS = {
    "step": (),
    "server": (),
    "local_tensors": ("model",),
    "resting": ("model",),
    "begin": ("round",),
    "begins": ("round",),
    "while_training": ("round", "module"),
    "goes_ahead": (),
    "holds": ("round",),
    "phase": ("round", "number"),
    "gradients": ("work",),
    "end": ("round", "update", "steps"),
    "answer": ("round", "data"),
    "before_evaluation": ("round", "module"),
}

BUILTINS: Mapping[str, type[ClientAlgorithm]] = {
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "scaffold": Scaffold,
    "fednova": FedNova,
    "feddyn": FedDyn,
    "moon": Moon,
    "fedsam": FedSam,
    "qfedavg": QFedAvg,
    "fedexp": FedExp,
    "cyclic": Cyclic,
    "finetuning": FineTuning,
    "ditto": Ditto,
    "pfedme": PFedMe,
    "apfl": Apfl,
    "perfedavg": PerFedAvg,
    "fedper": FedPer,
    "fedrep": FedRep,
    "fedbabu": FedBabu,
    "lg_fedavg": LgFedAvg,
    "fedbn": FedBn,
    "streaming": Streaming,
    "eager": Eager,
}
"""The algorithms that train any model."""
FACTORED: Mapping[str, type[ClientAlgorithm]] = {"flora": Flora, "flexlora": FlexLora, "hetlora": HetLora}
"""Those that train low-rank factors."""
_ALL: Mapping[str, type[ClientAlgorithm]] = {**BUILTINS, **FACTORED, "analysis": Analysis}


class UnreadTable(AlgorithmTable):
    """The table of an algorithm in a file that is not here: its keys are kept, and checked by who has it."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    @model_validator(mode="after")
    def _travels(self) -> UnreadTable:
        TypeAdapter(Open).validate_python(self.model_extra or {})
        return self


def make_algorithm(table: AlgorithmTable, folder: Path | None = None) -> ClientAlgorithm:
    """The algorithm that a job names; a file is looked for in `folder`, and None refuses it.

    Raises ConfigError for a name that is not known and for keys that the algorithm does not have.
    """
    kind = find_algorithm(table.name, folder)
    if isinstance(table, kind.Table) and not isinstance(table, UnreadTable):
        return kind(table)
    try:
        return kind(kind.Table.model_validate(table.model_dump()))
    except ValidationError as error:
        said = "; ".join(
            f"algorithm.{'.'.join(map(str, mistake['loc']))}: {mistake['msg']}" for mistake in error.errors()
        )
        raise ConfigError(f"algorithm {table.name!r}: {said}") from None


def same_layouts(one: AlgorithmTable, other: AlgorithmTable) -> bool:
    """Whether both surely make the same layout of any model: the same places, and all tensors travel alike.

    Not where an algorithm says which tensors stay local, as that may follow from its table, and not where it
    is a file: nobody here has its class.
    """
    if any(isinstance(table, UnreadTable) for table in (one, other)):
        return False
    made = [make_algorithm(table) for table in (one, other)]
    shapes = [[(place.name, place.shape, place.sent) for place in each.places] for each in made]
    plain = ClientAlgorithm.local_tensors
    return shapes[0] == shapes[1] and all(type(each).local_tensors is plain for each in made)


def may_keep_own(table: AlgorithmTable) -> bool:
    """Whether clients' models may be others than the global one; said of an algorithm in a file, too, whose
    class not everybody has who reads the job."""
    return is_file(table.name) or find_algorithm(table.name).keeps_own()


def find_algorithm(name: str, folder: Path | None = None) -> type[ClientAlgorithm]:
    """The class of this name. Raises ConfigError where there is none, or where it is none."""
    kind = resolve("algorithm", name, _ALL, ENTRY_POINTS, folder)
    if not (isinstance(kind, type) and issubclass(kind, ClientAlgorithm)):
        raise ConfigError(
            f"algorithm {name!r}{place_of(kind)} is not a subclass of roundtable.ClientAlgorithm"
        )
    if not (isinstance(kind.Table, type) and issubclass(kind.Table, AlgorithmTable)):
        raise ConfigError(
            f"algorithm {name!r}{place_of(kind)}: its Table is not a subclass of roundtable.AlgorithmTable"
        )
    check_methods(f"algorithm {name!r}", kind, _HOOKS)
    return kind


def _read(value: Any, _: Any, info: ValidationInfo) -> AlgorithmTable:
    """The table as its algorithm's own class; mistakes name the key, the nearest one and its owner."""
    if isinstance(value, AlgorithmTable):
        return value
    if not isinstance(value, dict):
        return AlgorithmTable.model_validate(value)
    name = value.get("name", "fedavg")
    if not isinstance(name, str):
        return AlgorithmTable.model_validate(value)
    folder = (info.context or {}).get(FOLDER)
    if is_file(name) and folder is None:
        return UnreadTable.model_validate(value)
    try:
        table = find_algorithm(name, folder).Table
    except ConfigError as error:
        hint = AlgorithmTable.hints.get(name)
        said = f"unknown algorithm {name!r}; {hint}" if hint else str(error)
        raise _failure([_mistake(("name",), name, said)]) from None
    try:
        return table.model_validate(value)
    except ValidationError as error:
        raise _failure([_explained(table, name, mistake) for mistake in error.errors()]) from None


def _explained(table: type[AlgorithmTable], name: str, mistake: Any) -> InitErrorDetails:
    """A mistake of pydantic's, in our words where it is about a key that is missing or too many."""
    place, key = mistake["loc"], str(mistake["loc"][-1]) if mistake["loc"] else ""
    if mistake["type"] == "extra_forbidden":
        owners = [repr(other) for other, kind in _ALL.items() if key in kind.Table.model_fields]
        if owners:
            said = f"belongs to name = {' or '.join(owners)}, and this table has name = {name!r}"
            return _mistake(place, mistake["input"], said)
        close = difflib.get_close_matches(key, table.model_fields, n=1, cutoff=0.5)
        hint = table.hints.get(key) or (
            f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(table.model_fields)}"
        )
        return _mistake(place, mistake["input"], f"unknown key; {hint}")
    if mistake["type"] == "missing":
        said = f"missing; algorithm {name!r} needs it ({table.model_fields[key].description})"
        return _mistake(place, mistake["input"], said)
    context = mistake.get("ctx", {})
    return InitErrorDetails(type=mistake["type"], loc=place, input=mistake["input"], ctx=context)


def _mistake(place: tuple[int | str, ...], value: Any, said: str) -> InitErrorDetails:
    # The message is no template: what somebody wrote into a file may hold braces.
    kind = PydanticCustomError("value_error", "{said}", {"said": said})
    return InitErrorDetails(type=kind, loc=place, input=value)


def _failure(mistakes: list[InitErrorDetails]) -> ValidationError:
    return ValidationError.from_exception_data("algorithm", mistakes)


AlgorithmField = Annotated[SerializeAsAny[AlgorithmTable], WrapValidator(_read)]
"""The `[algorithm]` of a job: a table of the class that the algorithm of its name declares."""
