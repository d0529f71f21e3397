"""Reference pages of the files that people write, out of the tables that read them.

Each key comes with its kind, choices, bounds, unit, default and an example, all asked of the models' fields;
tests/house/test_site.py tries every example.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel, BeforeValidator, StringConstraints
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python

from roundtable.cli.shared.resolved import toml_value
from roundtable.core.quantities import parse_duration

EXAMPLES: Mapping[str, Mapping[str, Any]] = {
    "JobConfig": {"name": "hospitals", "metrics": {"f1": "2*tp/(2*tp+fp+fn)"}},
    "JobTaskTable": {"name": "digits"},
    "ModelTable": {"only": ["*lora_*"], "local": ["head.*"], "drop": ["*.num_batches_tracked"]},
    "CohortTable": {"label": "region", "parameters": {"share": 0.5}, "probability": 0.1},
    "AlgorithmTable": {"max_gradient_norm": 1.0},
    "AggregationTable": {
        "parameters": {"f": 2},
        "pre": [{"name": "nnm"}],
        "weights": {"north": 2.0, "south": 1.0},
    },
    "ServerOptimizerTable": {
        "parameters": {"decay": 0.5},
        "momentum": 0.9,
        "beta_1": 0.9,
        "beta_2": 0.99,
        "tau": 0.001,
        "schedule": {"name": "cosine"},
    },
    "EvaluationTable": {"bounds": {"accuracy": 1.0, "loss": 20.0}},
    "StopTable": {"metric": "accuracy", "target": 0.95},
    "KeepTable": {"best": True},
    "TrackingTable": {"tensorboard": "runs/board", "mlflow": "runs/mlflow", "wandb": "hospitals"},
    "QueueTable": {"project": "cardiology", "after": ["pretraining"], "repeat": "0 3 * * *"},
    "ResourcesTable": {
        "memory": "16GiB",
        "disk": "50GiB",
        "labels": {"region": "north"},
        "at_least": [{"silos": 3, "labels": {"region": "north"}}],
    },
    "SimulationTable": {
        "data": {"path": "digits.npz"},
        "devices": {"speed": 1.0},
        "dropouts": {"probability": 0.1},
        "metadata": {"region": ["north", "south"]},
        "capacity": {"gpus": 1},
        "declare": ["examples"],
        "attack": {"name": "sign_flip", "count": 2},
        "regions": {"count": 3},
    },
    "AgentTable": {
        "coordinator": "coordinator.example.org:7443",
        "standbys": ["standby.example.org:7443"],
        "relay": "relay-north",
        "tasks": {"digits": "tasks/digits.py:Digits"},
        "encodings": {"thirds": "9c1e" * 16},
        "data": {"path": "/srv/digits.npz"},
        "metrics": "127.0.0.1:9465",
        "page": "127.0.0.1:7446",
        "log_levels": {"roundtable.client": "debug"},
        "traces": "http://127.0.0.1:4318/v1/traces",
        "metadata": {"region": "north"},
        "health": [{"name": "scanner", "command": ["/usr/local/bin/scanner-ready"]}],
    },
    "ClusterTable": {"interface": "eth0", "peak_flops": 9.89e14, "checkpoints": ["/mnt/copies"]},
    "StrategyTable": {
        "pp": 2,
        "dp": 2,
        "fsdp": 2,
        "tp": 2,
        "cp": 2,
        "ep": 2,
        "micro_batch": 4,
        "virtual_stages": 2,
        "checkpoint_every": 2,
        "checkpoint_blocks": [0, 2],
        "checkpoint_memory": 0.5,
        "reduction": "bfloat16",
        "outer_learning_rate": 0.7,
        "outer_momentum": 0.9,
    },
    "PolicyTable": {
        "epsilon": 4.0,
        "delta": 1e-5,
        "stated_epsilon": 4.0,
        "client_level_epsilon": 4.0,
        "example_level_epsilon": 4.0,
        "submitters": ["alice"],
        "rounds": 100,
        "epochs": 5,
        "steps": 200,
        "batch_size": 64,
        "max_memory": "16GiB",
        "max_gpus": 1,
        "max_gpu_memory": "40GiB",
        "hours": "20:00-06:00",
        "metrics_digits": 3,
    },
    "AnalysesTable": {"allowed": ["describe"], "tables": ["patients"], "protected": ["birth"]},
    "LogSharingTable": {"kinds": ["agent"], "tasks": ["digits"], "jobs": ["hospitals"]},
    "ServerConfig": {
        "database": "postgresql://roundtable@db/roundtable",
        "artifacts": "/srv/artifacts",
        "bucket": "s3://models/roundtable",
        "operators": "0.0.0.0:7445",
        "enrolment": "0.0.0.0:7444",
        "announce": "coordinator.example.org:7443",
        "copies": ["file:///mnt/copies"],
        "projects": {"cardiology": {"weight": 2.0}},
        "metrics": "127.0.0.1:9464",
        "log_levels": {"roundtable.server": "debug"},
        "traces": "http://127.0.0.1:4318/v1/traces",
        "populations": {"cardiology": ["north", "south"]},
        "encodings": {"thirds": "9c1e" * 16},
        "root_data": {"digits": {"task": "digits.py"}},
    },
    "OidcTable": {
        "issuer": "https://id.example.org",
        "audience": "roundtable",
        "jwks": "/etc/roundtable/jwks.json",
        "roles": {"researchers": "operator"},
        "client": "roundtable-page",
        "client_secret": "oidc.secret",
        "page": "https://roundtable.example.org:7445",
    },
    "AlertTable": {"webhook": "https://chat.example.org/hook", "command": ["/usr/local/bin/page-us"]},
    "DashboardTable": {
        "listen": "0.0.0.0:7445",
        "certificate": "page.crt",
        "key": "page.key",
        "hosts": ["roundtable.example.org"],
    },
    "RelayTable": {
        "coordinator": "coordinator.example.org:7443",
        "standbys": ["standby.example.org:7443"],
        "metrics": "127.0.0.1:9466",
        "log_levels": {"roundtable.relay": "debug"},
    },
    "TaskTable": {
        "use": "tasks/scans.py:Scans",
        "blake3": "5f0c" * 16,
        "data": {"path": "/srv/scans"},
        "parameters": ["width"],
    },
    "HealthTable": {"name": "scanner", "command": ["/usr/local/bin/scanner-ready"], "entry": "scanner"},
    "RootTable": {"task": "digits.py", "data": {"path": "/srv/root.npz"}, "parameters": ["width"]},
    "HeadTable": {"head": ["fc.*"]},
    "FtrlLevel": {"coefficients": [1.0, 0.5, 0.375], "decays": [0.9, 0.5]},
    "ColumnTable": {
        "unit": "mg/dl",
        "least": 0.0,
        "most": 600.0,
        "values": ["female", "male"],
        "missing": ["?"],
        "recode": {"M": "male"},
    },
    "_AskTable": {
        "name": "who they are",
        "columns": ["age", "cholesterol"],
        "column": "cholesterol",
        "by": "sex",
        "rows": "sex",
        "outcome": "disease",
        "factors": ["age", "sex"],
        "time": "days",
        "event": "died",
        "on": ["age", "sex"],
    },
    "ContingencyTable": {"columns": "disease"},
    "NoPrivacy": {"clip_norm": 1.0},
    "NoisyLevel": {"epsilon": 4.0, "delta": 1e-5, "noise_multiplier": 1.0, "clip_norm": 1.0},
}
"""Of keys whose kind does not say what stands there, by the class of their table, or a base of it."""
BY_KIND: Mapping[str, Any] = {"yes or no": True, "integer": 10, "number": 0.5, "duration": "10m"}


@dataclass(frozen=True)
class Key:
    """One key of one table; `default` is None where there is none, and `required` says whether it must be."""

    model: type[BaseModel]
    table: str
    name: str
    info: FieldInfo
    kind: str
    bounds: str
    required: bool
    default: Any

    @property
    def path(self) -> str:
        """table.key, as `--set` takes it."""
        return f"{self.table}.{self.name}" if self.table else self.name

    @property
    def example(self) -> Any:
        """A value that may stand there: the default where it says something."""
        for base in self.model.__mro__:
            if self.name in EXAMPLES.get(base.__name__, {}):
                return EXAMPLES[base.__name__][self.name]
        if self.default not in (None, "", (), [], {}):
            return self.default
        choices = _choices(self.info.annotation)
        if choices:
            return choices[-1]
        if self.default is None:
            return _within(self.info, BY_KIND.get(self.kind, None))
        return None


def keys(model: type[BaseModel], table: str = "") -> Iterator[Key]:
    """The keys of a table itself; tables within it come by `tables`."""
    for name, info in model.model_fields.items():
        if _model_of(info.annotation) is None:
            default = info.get_default(call_default_factory=True)  # type: ignore[call-overload]
            if isinstance(default, BaseModel):
                continue
            missing = default is PydanticUndefined
            yield Key(
                model,
                table,
                name,
                info,
                kind(info.annotation, info.metadata),
                _bounds(_all_metadata(info)),
                missing,
                None if missing else default,
            )


def tables(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """(dotted name, model) of a table and of all tables in it, in the order of the file."""
    yield path, model
    for name, info in model.model_fields.items():
        inner = _model_of(info.annotation)
        if inner is not None:
            yield from tables(inner, f"{path}.{name}" if path else name)


def table_page(path: str, model: type[BaseModel], title: str = "", level: int = 2) -> list[str]:
    """The lines of one table: heading, what it is for, its keys."""
    found = list(keys(model, path))
    about = _first_lines(model)
    lines = [f"{'#' * level} {title or (f'`[{path}]`' if path else 'At the top')}", "", about, ""]
    if not found:
        return lines
    lines += ["| key | what it is for | kind | default | example |", "| --- | --- | --- | --- | --- |"]
    for key in found:
        shown = code(f"{key.name} = {toml(key.example)}") if key.example is not None else ""
        said = f"{cell(key.info.description or '')} | {cell(_kind_and_bounds(key))}"
        lines.append(f"| `{key.name}` | {said} | {_default(key)} | {shown} |")
    return [*lines, ""]


def document_page(title: str, about: str, model: type[BaseModel], skip: Iterable[str] = ()) -> list[str]:
    """A whole file: its tables one after the other."""
    lines = [f"# {title}", "", about, ""]
    for path, inner in tables(model):
        if path not in skip:
            lines += table_page(path, inner)
    return lines


def kind(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """What may stand there, in words."""
    if any(isinstance(each, BeforeValidator) and each.func is parse_duration for each in metadata):
        return "duration"
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return kind(inner[0], inner[1:])
    if origin is Literal:
        return "one of " + ", ".join(toml(choice) for choice in inner)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(kind(each) for each in inner if each is not types.NoneType))
    if origin in (tuple, list):
        return f"list of {kind(inner[0])}"
    if origin in (dict, Mapping) or annotation is dict or origin is not None:
        return "table"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "table"
    names = {bool: "yes or no", int: "integer", float: "number", str: "text"}
    return names.get(annotation, "text")


def toml(value: Any) -> str:
    """The value as a TOML file has it; a table's own values as JSON would have them."""
    return toml_value(to_jsonable_python(value, exclude_none=True))


def cell(text: str) -> str:
    """Text as a cell of a Markdown table."""
    plain = " ".join(text.split()).replace("|", "\\|").replace("*", "\\*")
    return plain.replace("<", "&lt;").replace("[", "\\[")


def code(text: str) -> str:
    """Text as code in a cell of a Markdown table."""
    return f"`{text}`".replace("|", "\\|") if "`" not in text else cell(text)


def _kind_and_bounds(key: Key) -> str:
    unit = ', in seconds or as "5m"' if key.kind == "duration" else ""
    return f"{key.kind}{unit}{', ' + key.bounds if key.bounds else ''}"


def _default(key: Key) -> str:
    if key.required:
        return "required"
    return "not set" if key.default is None else code(toml(key.default))


def _first_lines(model: type[BaseModel]) -> str:
    told = inspect.cleandoc(model.__doc__ or "")
    return told if "\n    " not in told else told.split("\n\n")[0]


def _model_of(annotation: Any) -> type[BaseModel] | None:
    """The table that stands under a key, if one and only one does."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _model_of(inner[0])
    if origin in (Union, types.UnionType):
        parts = [each for each in inner if each is not types.NoneType]
        return _model_of(parts[0]) if len(parts) == 1 else None
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _all_metadata(info: FieldInfo) -> list[Any]:
    found = list(info.metadata)
    parts = [info.annotation, *get_args(info.annotation)]
    for part in parts:
        if get_origin(part) is Annotated:
            for each in get_args(part)[1:]:
                found += each.metadata if isinstance(each, FieldInfo) else [each]
    return found


def _bounds(metadata: Iterable[Any]) -> str:
    said = []
    for each in metadata:
        if isinstance(each, annotated_types.Ge):
            said.append(f"≥ {each.ge}")
        elif isinstance(each, annotated_types.Gt):
            said.append(f"> {each.gt}")
        elif isinstance(each, annotated_types.Le):
            said.append(f"≤ {each.le}")
        elif isinstance(each, annotated_types.Lt):
            said.append(f"< {each.lt}")
        elif isinstance(each, StringConstraints) and each.pattern:
            said.append(f"matches {each.pattern}")
    return ", ".join(dict.fromkeys(said))


def _choices(annotation: Any) -> tuple[Any, ...]:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return inner
    found = [_choices(part) for part in inner] if origin in (Union, types.UnionType) else []
    return next((each for each in found if each), ())


def _within(info: FieldInfo, value: Any) -> Any:
    """The value, moved into the field's bounds."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    for each in _all_metadata(info):
        if isinstance(each, (annotated_types.Le, annotated_types.Lt)):
            most = each.le if isinstance(each, annotated_types.Le) else each.lt
            value = min(value, most if isinstance(each, annotated_types.Le) else most / 2)  # type: ignore[type-var,operator]
    return value
