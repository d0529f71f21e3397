"""A head of classes over a pretrained encoder: what of a base it takes, what is fresh in it, who draws that.

A base that was published without a head of classes gets one whose weights are drawn; so does an encoder whose
pooler, the layer between it and the head, was not published with it (BERT's, where words alone were masked).
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from roundtable.core.errors import TaskError
from roundtable.core.seeds import derive_seed

Inputs = Literal["text", "pairs", "images"]
ProblemType = Literal["single_label_classification", "regression"]
"""As config.json of transformers' models has it."""
_POOLER = "pooler"
_KIND = {"text": "ForSequenceClassification", "pairs": "ForSequenceClassification"}
_KIND["images"] = "ForImageClassification"


@dataclass(frozen=True)
class ClassifierHead:
    """Which labels the head tells apart, in their order, and of what; for a regression what the number is."""

    labels: tuple[str, ...]
    inputs: Inputs
    fresh: bool = False
    """Drawn, whatever head the base has."""
    problem_type: ProblemType = "single_label_classification"

    @property
    def auto(self) -> str:
        """The class of transformers that puts such a head over a base."""
        return f"AutoModel{_KIND[self.inputs]}"

    def is_in(self, config: Any) -> bool:
        """Whether the base of this configuration has such a head already, which is to stay."""
        return not self.fresh and any(
            name.endswith(_KIND[self.inputs]) for name in config.architectures or ()
        )

    def configured(self, config: Any) -> Any:
        """The configuration with these labels."""
        made = copy.deepcopy(config)
        made.id2label = dict(enumerate(self.labels))
        made.label2id = {label: number for number, label in enumerate(self.labels)}
        made.problem_type = self.problem_type
        return made

    def check_labels(self, config: Any) -> None:
        """TaskError where a base that has a head already tells other labels apart."""
        own = tuple(str(label) for _, label in sorted(config.id2label.items()))
        if own != self.labels:
            raise TaskError(
                f"it is a classifier already, of the labels {', '.join(own[:20])}, and the job's are "
                f"{', '.join(self.labels[:20])}: set labels to its own in that order, or fresh_head = true "
                "for a head that is drawn"
            )


def check_loaded(model: Any, told: dict[str, Iterable[Any]], has_head: bool, fresh: bool) -> list[str]:
    """The parameters that are to be drawn: of its head, all where it is `fresh`, or those that the base's
    files lack, and of its pooler.

    TaskError for a tensor of the base itself that is missing, left over, or of another shape; another head
    may be left over, and a pooler.
    """
    base: nn.Module = getattr(model, model.base_model_prefix, model)
    start = f"{model.base_model_prefix}."
    parts = {name.partition(".")[0] for name in base.state_dict()}
    missing = sorted(map(str, told.get("missing_keys", ())))
    beside = [name for name in missing if not name.startswith(start) or _POOLER in name.split(".")]
    others = told.get("mismatched_keys", ())
    mismatched = [each if isinstance(each, str) else str(each[0]) for each in others]
    if fresh:
        beside += [name for name, _ in model.named_parameters() if not name.startswith(start)]
        mismatched = [name for name in mismatched if name.startswith(start)]
    odd = {
        "missing": missing if has_head else [name for name in missing if name not in beside],
        "unexpected": [
            name
            for name in sorted(map(str, told.get("unexpected_keys", ())))
            if (name.startswith(start) or name.partition(".")[0] in parts) and _POOLER not in name.split(".")
        ],
        "mismatched": sorted(mismatched),
    }
    for kind, names in odd.items():
        if names:
            raise TaskError(
                f"its weights are not those of its config.json: {len(names)} {kind}, such as {names[0]}"
            )
    return sorted(set(beside))


def modules_of_head(model: Any, fresh: Iterable[str]) -> list[str]:
    """The names of the modules that train whole: all beside the base, and a pooler of it that is fresh."""
    found = {
        name
        for name, module in model.named_children()
        if name != model.base_model_prefix and any(True for _ in module.parameters())
    }
    for name in fresh:
        path = name.split(".")
        if path[0] == model.base_model_prefix:
            found.add(".".join(path[: path.index(_POOLER) + 1]))
    return sorted(found)


def unpublished_pooler(model: Any, published: Iterable[str]) -> list[str]:
    """The parameters of the model's pooler where the base's files, of these names, have none."""
    if any(_POOLER in name.split(".") for name in published):
        return []
    return [name for name, _ in model.named_parameters() if _POOLER in name.split(".")]


def in_float32(model: nn.Module, modules: Iterable[str]) -> None:
    """Makes these modules float32, which may follow others in half precision."""
    for name in modules:
        module = model.get_submodule(name).float()
        module.register_forward_pre_hook(_to_float32)


def _to_float32(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        each.float() if isinstance(each, Tensor) and each.is_floating_point() else each for each in inputs
    )


def draw(model: Any, fresh: Collection[str]) -> None:
    """Draws these parameters as transformers does, by torch's seed alone, whatever loading has drawn.

    TaskError for a kind of model that leaves one of them as it is.
    """
    named = dict(model.named_parameters())
    modules = sorted({name.rpartition(".")[0] for name in fresh})
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(derive_seed(torch.initial_seed(), "head"))
        for name in fresh:
            named[name].fill_(float("nan"))
            named[name]._is_hf_initialized = False
        for name in modules:
            model._init_weights(model.get_submodule(name))
    if left := [name for name in fresh if not bool(named[name].isfinite().all())]:
        raise TaskError(
            f"its {left[0]!r} is not in its files, and this kind of model has no way to draw it: take a base "
            "that was published with it"
        )
