"""Adapters over a pretrained model: put on by peft, drawn by the job's seed, named as their files name them.

LoRA is Hu et al. 2022 (equation 3); FFA-LoRA, in which A is frozen and common to all, Sun et al. 2024
(section 4).
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from roundtable.core.errors import TaskError
from roundtable.core.foundation.base_model import library
from roundtable.core.foundation.prefix import PROMPT

WHOLE, ORIGINAL = ".modules_to_save.", ".original_module."
"""In names of a module that trains whole: of its copy that does, and of what it was before."""


def adapted(model: nn.Module, config: Any) -> Any:
    """peft's model over this one. What peft finds out and sets right by itself is not said.

    TaskError where the model has none of the modules that are to get adapters.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")
        warnings.filterwarnings("ignore", message=".*is deprecated.*", category=FutureWarning)
        # Of a mixture of experts, whose adapters peft would also write otherwise.
        warnings.filterwarnings("ignore", message=r"The following (rank|alpha)_pattern keys did not match")
        warnings.filterwarnings("ignore", message="The PEFT config's `base_model_name_or_path` was renamed")
        try:
            return library("peft").get_peft_model(model, config)
        except (ValueError, KeyError) as error:
            # What peft has looked up in vain may be None or nothing.
            what = ""
            if "target_modules" in str(error) and not config.target_modules:
                what = '; name them as targets in the job\'s [task] table, or "all-linear"'
            elif "feedforward_modules" in str(error):
                what = '; method = "ia3" is for the kinds of models that it knows alone: set method = "lora"'
            raise TaskError(f"adapters do not fit this base: {error}{what}") from error


def with_adapters(model: nn.Module, config: Any, *, freeze_down: bool, targets: Any) -> Any:
    """The same with what is drawn drawn by torch's seed alone, whatever loading has drawn; `freeze_down`:
    with A as it is. TaskError where what trains is not what an adapter's file holds."""
    seed, whole = torch.initial_seed(), set(getattr(config, "modules_to_save", None) or ())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = adapted(model, config)
    if freeze_down:
        for name, parameter in made.named_parameters():
            if ".lora_A." in name:
                parameter.requires_grad_(False)
    _check_trained(made, freeze_down, targets, whole)
    return made


def _check_trained(model: Any, freeze_down: bool, targets: Any, whole: set[str]) -> None:
    """What trains must be what an adapter's file holds: else an export would lack it."""
    held = set(library("peft").get_peft_model_state_dict(model, save_embedding_layers=False))
    trained = {plain_name(name) for name, p in model.named_parameters() if p.requires_grad}
    if freeze_down:
        held = {name for name in held if ".lora_A." not in name}
    if embeddings := sorted(name for name in trained if ".lora_embedding_" in name):
        raise TaskError(
            f"targets = {targets!r}: {embeddings[0]!r} is a factor of an embedding's, which is "
            "neither frozen by ffa_lora nor merged by flora: choose linear layers as targets"
        )
    if trained != held:
        odd = sorted(trained ^ held)
        raise TaskError(
            f"targets = {targets!r}: {odd[0]!r} trains and is not what an adapter's file holds, or "
            "the other way round: choose linear layers as targets"
        )
    wholes = {
        name.partition(WHOLE)[0].removeprefix("base_model.model.")
        for name, _ in model.named_parameters()
        if WHOLE in name
    }
    if wholes != whole:
        raise TaskError(
            f"this base's {min(wholes ^ whole)!r} would train as if it were of its head, or the other way "
            "round: take another base"
        )


def plain_name(name: str) -> str:
    """An adapter's tensor as its file names it: without the name that the adapter has in memory."""
    if name == PROMPT:
        return "prompt_embeddings"
    magnitude = ".lora_magnitude_vector.default.weight"
    if name.endswith(magnitude):
        return name.removesuffix(".default.weight")
    name = name.replace(f"{WHOLE}default.", ".")
    return name.replace(".default.", ".").removesuffix(".default")
