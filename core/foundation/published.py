"""What a job trained, as files that other tools load: an adapter of peft, a whole model of transformers."""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import safetensors
import safetensors.torch
import torch
from blake3 import blake3
from safetensors import SafetensorError
from torch import Tensor, nn

from roundtable.core.config import JobConfig
from roundtable.core.errors import ConfigError, EncodingError, ModelMismatch, TaskError
from roundtable.core.foreign_text import json_text, markdown_text, printable
from roundtable.core.foundation.adapters import ORIGINAL, adapted, plain_name
from roundtable.core.foundation.base_model import find_base, library
from roundtable.core.foundation.checkpoint_files import name_digests
from roundtable.core.foundation.classifier_head import ClassifierHead, Inputs, ProblemType
from roundtable.core.foundation.labelled_rows import check_labels
from roundtable.core.foundation.logits_program import check_onnx, write_program
from roundtable.core.foundation.model_difference import model_difference, pins_difference
from roundtable.core.foundation.prefix import PROMPT
from roundtable.core.foundation.pretrained_task import PINNED, PretrainedTask
from roundtable.core.initial_model import with_frozen
from roundtable.core.layout import Layout
from roundtable.core.models import Model, model_digest
from roundtable.core.paths import AnyPath
from roundtable.core.task import initial_state
from roundtable.core.tensor_spec import digest_of_values

Format = Literal["peft", "transformers", "traced", "onnx"]
ADAPTER, CONFIG = "adapter_model.safetensors", "adapter_config.json"
STATEMENT = "provenance.json"
_CELL = 1 << 16
"""Characters of a line of the card: the pseudonyms of some thousand silos."""
_BASE, _HEAD = "roundtable.base", "roundtable.head"


@dataclass(frozen=True)
class Story:
    """What the card says of a job: rounds that made the model, and the silos that took part in them, under
    names that are not their own.

    `statement` is the coordinator's signed one of where the model comes from, by `signer`; empty without.
    """

    job: str
    round: int
    silos: Sequence[str]
    statement: str = ""
    signer: str = ""


def check_publishable(task: PretrainedTask, folder: Path, kind: Format) -> None:
    """ConfigError for a folder that holds something or a format that does not fit; TaskError where this
    machine lacks the base."""
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is there already and not empty: name another folder")
    if kind == "peft" and task.method == "full":
        raise ConfigError(
            'all weights were trained (method = "full"), which is no adapter: --format transformers'
        )
    if kind != "peft" and task.method == "prefix":
        raise ConfigError(
            f'a prefix (method = "prefix") is no change of weights, and no model can be made of it: '
            f"--format peft, not {kind}"
        )
    if kind != "peft" and task.precision == "nf4":
        raise ConfigError(
            'precision = "nf4": adapters are merged in float32, and this base is in 4 bits, so that the '
            f"merged model would be another: --format peft, not {kind}"
        )
    if kind == "onnx":
        check_onnx()
    find_base(task.base)


def publish(
    job: JobConfig,
    task: PretrainedTask,
    model: Model,
    folder: Path,
    kind: Format,
    told: Story,
    most: int | None = None,
) -> None:
    """Writes the job's model into an empty or new folder; "transformers" in files of at most `most` bytes.

    `model` may lack what is frozen: the task makes it, of the base that this machine has. Raises what
    `check_publishable` does, ModelMismatch where the base is not the job's, LayoutError where the task's
    adapters are not, EncodingError for values that are not finite.
    """
    check_publishable(task, folder, kind)
    pinned = (spec.name for spec in model.layout.tensors)
    if differs := pins_difference(task.frozen_beside_pretrained(), pinned, task):
        raise ModelMismatch(differs)
    trained: Any = initial_state(task, job.seed)
    whole = _over_base(task, model, trained.state_dict())
    state = whole.state_dict()
    for name, value in state.items():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise EncodingError(f"the model's {name!r} holds NaN or infinity: it is of no use to anybody")
    trained.load_state_dict(state)
    delattr(trained, PINNED)
    base = _shown(task.base)
    with tempfile.TemporaryDirectory(dir=_made(folder.parent)) as scratch:
        made = Path(scratch) / "made"
        if kind == "peft":
            notes = {_BASE: base_digest(whole.layout), "precision": task.precision, **_told_head(task)}
            _write_adapter(trained, base, notes, made)
        else:
            _write_merged(trained, task, kind, made, most)
        if told.statement:
            (made / STATEMENT).write_text(told.statement + "\n", encoding="utf-8")
        (made / "README.md").write_text(_card(job, task, model, base, kind, told), encoding="utf-8")
        folder.mkdir(exist_ok=True)
        for file in sorted(made.iterdir()):
            file.rename(folder / file.name)


def _over_base(task: PretrainedTask, model: Model, own: Mapping[str, Tensor]) -> Model:
    """The model with what is frozen, of this machine's `own`. ModelMismatch for a base of other weights, also
    where the model brings those of the job's."""
    model.layout.model.check(own)
    specs = model.layout.tensors
    here = Layout(
        tuple(
            replace(spec, digest=digest_of_values(own[spec.name])) if spec.digest else spec for spec in specs
        )
    )
    if here != model.layout:
        raise ModelMismatch(model_difference(here, model.layout, task))
    return with_frozen(model, own)  # Not copied: merging changes them.


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _told_head(task: PretrainedTask) -> dict[str, str]:
    head = task.pretrained_base.head
    return {} if head is None else {_HEAD: json.dumps(asdict(head))}


def _write_adapter(model: Any, base: str, notes: Mapping[str, str], folder: Path) -> None:
    peft = library("peft")
    folder.mkdir()
    state = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    values = {name: value.detach().float().cpu().contiguous() for name, value in state.items()}
    safetensors.torch.save_file(values, folder / ADAPTER, {"format": "pt", **notes})
    config = model.peft_config["default"]
    config.inference_mode = True
    config.base_model_name_or_path = base
    config.save_pretrained(folder)


def _write_merged(model: Any, task: PretrainedTask, kind: Format, folder: Path, most: int | None) -> None:
    """In float32: in half precision merging rounds what was learnt."""
    if task.method != "full":
        untied = _untied(model.float())
        _unwrap_wholes(model)
        model = model.merge_and_unload()
        if untied:
            model.config.tie_word_embeddings = False
    if kind == "traced" or kind == "onnx":
        folder.mkdir()
        write_program(task.traceable(model), kind, folder)
    else:
        model.config.dtype = torch.float32
        model.config._name_or_path = ""
        # Without a limit as the library has it.
        model.save_pretrained(folder, **({} if most is None else {"max_shard_size": most}))
        name_digests(folder)
    task.pretrained_base.save_reader(folder)


def _unwrap_wholes(model: Any) -> None:
    """Puts what trained whole in its place: peft does so itself for modules that are one layer alone."""
    for name, module in list(model.named_modules()):
        trained = getattr(module, "modules_to_save", None)
        if isinstance(trained, nn.ModuleDict):
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, trained["default"])


def _untied(model: Any) -> bool:
    """Gives each layer with an adapter weights that are its own, and says whether any were another's, too:
    what is merged into a head that shares them would be in the embedding as well."""
    counts = Counter(id(value) for _, value in model.named_parameters(remove_duplicate=False))
    found = False
    for module in model.modules():
        layer: Any = getattr(module, "base_layer", None)
        if layer is not None and counts[id(getattr(layer, "weight", None))] > 1:
            layer.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
            found = True
    return found


def base_digest(layout: Layout) -> str:
    """One digest of all frozen weights of the base, whatever is trained over it; without those of a head,
    which are drawn where a base has none."""
    # Over a prefix the base is not wrapped a second time.
    prefix = any(spec.name == PROMPT for spec in layout.averaged)
    outer = ("base_model.", "base_model.model.") if prefix else ("", "")
    values = {
        outer[1] + plain_name(spec.name).replace(".base_layer.", ".").removeprefix(outer[0]): spec.digest
        for spec in layout.frozen
        if not spec.name.startswith(f"{PINNED}.") and ".lora_" not in spec.name and ORIGINAL not in spec.name
    }
    return blake3(json.dumps(values, sort_keys=True).encode()).hexdigest()


def load_adapter(folder: AnyPath, base: str, *, trainable: bool = False) -> nn.Module:
    """The base with the adapter over it, as `PeftModel.from_pretrained` gives it, but checked before.

    That one takes an adapter of another base, with tensors that it does not know, or with NaN, and says
    nothing. EncodingError says what differs: names, shapes, values, or the base's own weights, where the
    adapter was exported here and tells of them.
    """
    folder = Path(folder)
    values, notes = _adapter_of(folder)
    try:
        config = library("peft").PeftConfig.from_pretrained(folder)
    except (OSError, TypeError, ValueError, KeyError) as error:
        raise EncodingError(f"{folder / CONFIG} cannot be used: {error}") from error
    found = find_base(base, _head_of(notes, config, folder))
    precision = notes.get("precision", "float32")
    try:
        plain = found.load(precision) if found.head is None else found.load_classifier(precision)[0]
        model = adapted(plain, config)
    except (TaskError, KeyError) as error:
        raise EncodingError(f"{folder} is no adapter of {base!r}: {error}") from error
    expected = library("peft").get_peft_model_state_dict(model, save_embedding_layers=False)
    _compare(values, expected, folder)
    if _BASE in notes:
        own = base_digest(_frozen_layout(model, set(expected)))
        if own != notes[_BASE]:
            raise EncodingError(
                f"{folder} was trained over another base: its weights have the digest {notes[_BASE][:12]}, "
                f"those of {base!r} {own[:12]}"
            )
    library("peft").set_peft_model_state_dict(model, values)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trainable and plain_name(name) in expected)
    return model.train(trainable)  # type: ignore[no-any-return]


def _head_of(notes: Mapping[str, str], config: Any, folder: Path) -> ClassifierHead | None:
    """The head that an adapter was exported with. EncodingError where one is meant, and not which."""
    try:
        told = json.loads(notes[_HEAD]) if _HEAD in notes else None
        if told is None and config.task_type == "SEQ_CLS":
            raise ValueError("it does not say which labels, as one that was exported here does")
        if told is None:
            return None
        inputs, fresh, problem = told["inputs"], told["fresh"], told["problem_type"]
        if (
            inputs not in get_args(Inputs)
            or problem not in get_args(ProblemType)
            or not isinstance(fresh, bool)
        ):
            raise ValueError(f"inputs {str(inputs)[:40]!r}, {str(problem)[:40]!r}, fresh {str(fresh)[:40]!r}")
        return ClassifierHead(check_labels(told["labels"], problem), inputs, fresh, problem)
    except (ValueError, KeyError, TypeError, ConfigError) as error:
        raise EncodingError(f"{folder}: the adapter of a classifier cannot be used: {error}") from error


def _frozen_layout(model: nn.Module, trained: set[str]) -> Layout:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(plain_name(name) in trained)
    return Layout.of(model)


def _adapter_of(folder: Path) -> tuple[dict[str, Tensor], Mapping[str, str]]:
    try:
        with safetensors.safe_open(folder / ADAPTER, framework="pt") as file:
            names, notes = list(file.keys()), dict(file.metadata() or {})
            return {name: file.get_tensor(name) for name in names}, notes
    except (OSError, SafetensorError) as error:
        raise EncodingError(f"{folder / ADAPTER} cannot be read: {error}") from error


def _compare(values: Mapping[str, Tensor], expected: Mapping[str, Tensor], folder: Path) -> None:
    unknown, missing = sorted(values.keys() - expected.keys()), sorted(expected.keys() - values.keys())
    if unknown or missing:
        parts = [f"has {unknown[0]!r}, which it should not"] if unknown else []
        parts += [f"lacks {missing[0]!r}"] if missing else []
        raise EncodingError(
            f"{folder} is no adapter of this base and configuration: it {', and '.join(parts)}"
        )
    for name, value in values.items():
        if value.shape != expected[name].shape:
            raise EncodingError(
                f"{folder}: {name!r} has shape {list(value.shape)}, and the base and {CONFIG} ask for "
                f"{list(expected[name].shape)}: another rank or length of a prefix, or another base"
            )
        if not bool(value.isfinite().all()):
            raise EncodingError(f"{folder}: {name!r} holds NaN or infinity")


def _shown(base: str) -> str:
    """The base's name as others may read it: of a folder of this machine its last part alone."""
    plain = Path(base)
    hub = re.fullmatch(r"[\w.-]+/[\w.-]+", base) is not None and not plain.exists()
    return base if hub else plain.name


def _card(job: JobConfig, task: PretrainedTask, model: Model, base: str, kind: Format, told: Story) -> str:
    how = {
        "peft": f"PeftModel.from_pretrained({task.opened_by(base)}, FOLDER)",
        "transformers": f"{task.pretrained_base.auto}.from_pretrained(FOLDER)",
        "traced": f'torch.export.load("FOLDER/model.pt2").module()({", ".join(task.takes)})',
        "onnx": 'onnxruntime.InferenceSession("FOLDER/model.onnx").run(None, {'
        + ", ".join(f'"{name}": {name}' for name in task.takes)
        + "})",
    }[kind]
    privacy = model.metadata.get("privacy", "no differential privacy was asked for")
    silos = ", ".join(told.silos) or "not told"
    signed = f"signed by {told.signer}: {STATEMENT}" if told.statement else "no coordinator has signed for it"
    lines = {
        "base": f"{base} ({task.precision}), weights {base_digest(model.layout)[:16]}",
        "trained": f"{task.described()}; {model.layout.size:,} values travelled each round",
        "rounds": f"{told.round}, {job.algorithm.name}",
        "silos": silos,
        "privacy": privacy,
        "model": f"blake3 {model_digest(model.without_frozen())}",
        "provenance": signed,
    }
    rows = "\n".join(f"| {name} | {markdown_text(value, _CELL)} |" for name, value in lines.items())
    library = {"traced": "pytorch"}.get(kind, kind)
    head = f"library_name: {library}\nbase_model: {json_text(base)}\ntags:\n- federated-learning"
    # Names of a job may hold what ends a fence: one that is longer than each of theirs.
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", how)), default=0))
    return (
        f"---\n{head}\n---\n\n# {markdown_text(told.job)}\n\n"
        "Fine-tuned over silos that kept their data, by Roundtable.\n\n"
        f"| | |\n| --- | --- |\n{rows}\n\nLoad it with\n\n{fence}python\n{printable(how, _CELL)}\n{fence}\n"
    )
