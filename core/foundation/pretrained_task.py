"""What tasks that fine-tune a pretrained model share: its settings, its base, what trains, its pins.

LoRA is Hu et al. 2022 (equation 3); FFA-LoRA, in which A is frozen and common to all, Sun et al. 2024
(section 4); averaging both factors is FedIT (Zhang et al. 2024, algorithm 1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn
from typing_extensions import override

from roundtable.core.algorithms.round_context import Context
from roundtable.core.errors import ConfigError, TaskError
from roundtable.core.foundation.adapters import with_adapters
from roundtable.core.foundation.base_model import BaseModel, find_base, library
from roundtable.core.foundation.logits_program import Traceable
from roundtable.core.task import Site, Task

PINNED = "pinned"
"""The part of the model that holds digests of what all parties must have alike."""
AnyPrecision = Literal["float32", "bfloat16", "float16", "nf4"]
Row = TypeVar("Row")


class PretrainedTask(Task):
    """Fine-tunes a pretrained model; of adapters, and of what trains whole, nothing else travels.

    `base` is a folder, or a name in the cache of each party; `method` what trains, with `rank`, `alpha` (the
    scale is alpha/rank), `dropout` and `targets` (names of modules, or "all-linear"; None: those that peft
    chooses for this kind of model) for adapters. `precision` is that of the frozen base; what trains is
    float32. `test_share` of the data, the last of them, are kept for evaluation where no other are given.
    `betas` and `weight_decay` are AdamW's (Loshchilov and Hutter 2019, algorithm 2).
    """

    def __init__(
        self,
        base: str,
        length: int,
        method: str,
        rank: int,
        alpha: float,
        dropout: float,
        targets: list[str] | str | None,
        precision: AnyPrecision,
        checkpointing: bool,
        test_share: float,
        betas: Sequence[float],
        weight_decay: float,
    ) -> None:
        if length < 2 or rank < 1 or not 0 <= test_share < 1 or not 0 <= dropout < 1 or not alpha > 0:
            raise ConfigError(
                "task: length must be at least 2, rank at least 1, alpha above 0, test_share and dropout "
                f"from 0 to below 1; they are {length}, {rank}, {alpha}, {test_share} and {dropout}"
            )
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas) or not weight_decay >= 0:
            raise ConfigError(
                f"task: betas = {list(betas)}, weight_decay = {weight_decay}: of AdamW two betas from 0 to "
                "below 1, and a decay of at least 0",
                key=("task", "betas"),
            )
        if method == "full" and precision != "float32":
            raise ConfigError(
                f'task: method = "full" trains the base itself, and in {precision} small steps of its '
                'weights are rounded away: set precision = "float32", or train adapters',
                key=("task", "precision"),
            )
        self.base = base
        self.length = length
        self.method = method
        self.rank = rank
        self.alpha = alpha
        self.dropout = dropout
        self.targets = targets
        self.precision: AnyPrecision = precision
        self.checkpointing = checkpointing
        self.test_share = test_share
        self.betas = betas
        self.weight_decay = weight_decay

    @cached_property
    def pretrained_base(self) -> BaseModel:
        """The base as this party has it, found when it is first needed."""
        return find_base(self.base)

    def pretrained(self, site: Site) -> Path:
        """The base's folder: the ranks of a silo's [cluster] read their parts out of its files."""
        return self.pretrained_base.folder

    def frozen_beside_pretrained(self) -> dict[str, Tensor]:
        """What is frozen and neither in the base's files nor drawn by the job's seed, by its names."""
        return {f"{PINNED}.{name}": value for name, value in self.pretrained_base.pins().items()}

    @property
    def takes(self) -> tuple[str, ...]:
        """What its model takes, as transformers names it."""
        return ("input_ids",)

    @property
    def inseparable(self) -> str:
        """Which setting keeps the gradient of a row from being told from others', and what to set in its
        place; empty where it can be told, as privacy level "example" needs it."""
        if self.method not in ("dora", "ia3"):
            return ""
        return (
            f'method = "{self.method}", whose vectors scale what layers give, for which no way to such '
            'gradients has a rule: set method = "lora" or "ffa_lora"'
        )

    def opened_by(self, base: str) -> str:
        """The expression of Python by which others load the base of this name, for an adapter over it."""
        return f'{self.pretrained_base.auto}.from_pretrained("{base}")'

    def described(self) -> str:
        """What was trained, in a model card's words."""
        scale = f", rank {self.rank}, alpha {self.alpha:g}"
        return self.method + (scale if "lora" in self.method else "")

    def traceable(self, model: nn.Module) -> Traceable:
        """The model, all adapters merged, as a program takes and gives tensors."""
        raise NotImplementedError

    def adapter_config(self, kind: str | None, whole: Sequence[str] | None = None) -> Any:
        """peft's configuration of what trains: of this task type, the modules `whole` beside adapters."""
        peft, names = library("peft"), None if whole is None else list(whole)
        if self.method == "ia3":
            return peft.IA3Config(task_type=kind, target_modules=self.targets, modules_to_save=names)
        return peft.LoraConfig(
            task_type=kind,
            r=self.rank,
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            target_modules=self.targets,
            use_dora=self.method == "dora",
            modules_to_save=names,
        )

    def prepared(self, model: Any, config: Any) -> nn.Module:
        """The loaded base with its adapters, of which `config` is peft's (None: all of it trains), and pins.

        TaskError where they do not fit, or the model cannot compute activations again.
        """
        empty = nn.Linear(1, 1).weight.is_meta
        if config is not None:
            _check_statistics(model)
            model = with_adapters(model, config, freeze_down=self.method == "ffa_lora", targets=self.targets)
        if self.checkpointing and not empty:  # What ranks compute again is their plan's.
            try:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            except ValueError as error:
                raise TaskError(f"checkpointing = true: {error} Set it to false") from error
            model.enable_input_require_grads()
        pins = self.pretrained_base.pins()
        held = {name: nn.Parameter(value, requires_grad=False) for name, value in pins.items()}
        setattr(model, PINNED, nn.ParameterDict(held))
        return model  # type: ignore[no-any-return]

    def _shared_out(
        self,
        site: Site,
        read: Callable[[Path], Sequence[Row]],
        parts: Callable[[Sequence[Row]], Sequence[int]],
    ) -> tuple[Sequence[Row], Sequence[Row]]:
        """(training, test) rows of a site, of the files that `site.options` names: `file`, and `test_file`
        where the test data are others. In a simulation the job's partition shares them out by what `parts`
        makes of them: numbers from 0."""
        if not isinstance(site.options.get("file"), str):
            raise TaskError(
                'no data: name a .txt, .jsonl or .parquet file, as file = "…" in the silo\'s [data] table, '
                "or in [simulation.data] of the job"
            )
        found = read(Path(site.options["file"]).expanduser())
        own = [found[row] for row in site.shard(parts(found))]
        if isinstance(site.options.get("test_file"), str):
            return own, read(Path(site.options["test_file"]).expanduser())
        kept = round(len(own) * self.test_share)
        return own[: len(own) - kept], own[len(own) - kept :]

    @override
    def optimizer(  # type: ignore[override]
        self, parameters: Iterable[nn.Parameter], context: Context
    ) -> torch.optim.Optimizer:
        """AdamW at the job's learning rate."""
        first, second = self.betas
        return torch.optim.AdamW(
            parameters, lr=context.learning_rate, betas=(first, second), weight_decay=self.weight_decay
        )


def _check_statistics(model: nn.Module) -> None:
    """TaskError for averages that training moves, of which an adapter's file holds nothing."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
            raise TaskError(
                f"this base's {name!r} is a {type(module).__name__}, whose averages move in training, and no "
                'adapter\'s file holds them: set method = "full", or take a base without, such as a ViT'
            )


def numbered(labels: Sequence[str]) -> list[int]:
    """Each label's place among those there are."""
    numbers = {each: number for number, each in enumerate(sorted(set(labels)))}
    return [numbers[each] for each in labels]


def check_choices(choices: Mapping[str, tuple[Any, Any]]) -> None:
    """ConfigError for a setting of [task] that is none of its literal's values; by name (value, literal)."""
    for name, (value, known) in choices.items():
        if value not in get_args(known):
            raise ConfigError(
                f"task: {name} = {value!r}; choose one of {', '.join(get_args(known))}",
                key=("task", name),
            )
