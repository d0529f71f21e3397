"""A task that fine-tunes a causal language model of Hugging Face's libraries.

LoRA is Hu et al. 2022 (equation 3); FFA-LoRA, in which A is frozen and common to all, Sun et al. 2024
(section 4); averaging both factors is FedIT (Zhang et al. 2024, algorithm 1). Prefix tuning is Li and Liang
2021 (section 4.2, without its reparametrisation); DPO Rafailov et al. 2023.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from roundtable.core.algorithms.round_context import Context
from roundtable.core.errors import ConfigError, TaskError
from roundtable.core.foundation.base_model import BaseModel, find_base, library
from roundtable.core.foundation.generated_texts import GeneratedText, generated_texts
from roundtable.core.foundation.preferences import (
    preference_loss,
    preference_of,
    preference_rows,
    rewards,
)
from roundtable.core.foundation.prefix import PROMPT, check_prefix
from roundtable.core.foundation.row_check import check_rows
from roundtable.core.foundation.text_files import Text, read_texts
from roundtable.core.foundation.token_rows import (
    IGNORED,
    Learn,
    TokenRows,
    logits_of,
    packed,
    tokens_of,
)
from roundtable.core.measures.measured import perplexity
from roundtable.core.task import Dataset, Site, Task

Method = Literal["lora", "ffa_lora", "dora", "ia3", "prefix", "full"]
Objective = Literal["sft", "dpo"]
Precision = Literal["float32", "bfloat16", "float16", "nf4"]
PINNED = "pinned"
"""The part of the model that holds digests of what all parties must have alike."""


class HuggingFaceTask(Task):
    """Fine-tunes a pretrained causal language model; of adapters, nothing but what trains travels.

    `base` is a folder, or a name in the cache of each party; `length` the tokens of a row; `method` what
    trains, with `rank`, `alpha` (the scale is alpha/rank), `dropout` and `targets` (names of modules, or
    "all-linear"; None: those that peft chooses for this kind of model) for adapters. `virtual_tokens` is the
    length of a prefix, whose keys and values go before those of a row in each layer. `precision` is that of
    the frozen base, "nf4" 4 bits by bitsandbytes, on CUDA alone; adapters are float32. `learn` says whether
    the answers alone of chats and of prompts are learnt; `template` is a chat template in the place of the
    tokenizer's. `test_share` of the texts, the last ones, are kept for evaluation where no other are given.
    `objective` is "sft", the next token, or "dpo", preferences between two answers, whose `beta` holds the
    model to the base. Without `packing` a row holds one text. `betas` and `weight_decay` are AdamW's
    (Loshchilov and Hutter 2019, algorithm 2).
    """

    def __init__(
        self,
        base: str,
        length: int = 512,
        method: Method = "lora",
        rank: int = 8,
        alpha: float = 16.0,
        dropout: float = 0.0,
        targets: list[str] | str | None = None,
        precision: Precision = "float32",
        checkpointing: bool = False,
        learn: Learn = "answers",
        template: str | None = None,
        test_share: float = 0.1,
        objective: Objective = "sft",
        beta: float = 0.1,
        virtual_tokens: int = 20,
        packing: bool = True,
        betas: Sequence[float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        for name, value, known in (
            ("method", method, Method),
            ("precision", precision, Precision),
            ("learn", learn, Learn),
            ("objective", objective, Objective),
        ):
            if value not in get_args(known):
                raise ConfigError(
                    f"task: {name} = {value!r}; choose one of {', '.join(get_args(known))}",
                    key=("task", name),
                )
        if method == "prefix" and targets is not None:
            raise ConfigError(
                f'task: targets = {targets!r} with method = "prefix": a prefix is before every layer, and '
                "has no targets; leave them out",
                key=("task", "targets"),
            )
        if method == "prefix" and checkpointing:
            raise ConfigError(
                'task: method = "prefix" with checkpointing = true: a prefix is a cache of keys and values, '
                "which layers that are computed again do not take (peft refuses it); set checkpointing = "
                'false, or method = "lora"',
                key=("task", "checkpointing"),
            )
        if precision == "nf4" and method in ("ia3", "prefix"):
            why = {
                "ia3": "over 4 bits peft's layers give values of another precision than the model's",
                "prefix": "whether a base takes one is tried where it is loaded, in main memory, and 4 bits "
                "work on a GPU alone",
            }
            raise ConfigError(
                f'task: method = "{method}" with precision = "nf4": {why[method]}; set precision = '
                '"bfloat16", or method = "lora"',
                key=("task", "precision"),
            )
        if virtual_tokens < 1:
            raise ConfigError(
                f"task: virtual_tokens = {virtual_tokens}; a prefix has one token at least",
                key=("task", "virtual_tokens"),
            )
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
        if objective == "dpo" and (method == "full" or not beta > 0):
            raise ConfigError(
                f'task: objective = "dpo" with method = {method!r} and beta = {beta}: it compares with the '
                'base, which every method but "full" leaves beside what trains, and beta must be above 0',
                key=("task", "objective"),
            )
        self.base = base
        self.length = length
        # The rows of a preference's two answers.
        self.example_tokens = 2 * length if objective == "dpo" else length
        self.method: Method = method
        self.rank = rank
        self.alpha = alpha
        self.dropout = dropout
        self.targets = targets
        self.precision: Precision = precision
        self.checkpointing = checkpointing
        self.learn: Learn = learn
        self.template = template
        self.test_share = test_share
        self.objective: Objective = objective
        self.beta = beta
        self.virtual_tokens = virtual_tokens
        self.packing = packing
        self.betas = betas
        self.weight_decay = weight_decay

    @property
    def positions(self) -> int:
        """How many positions of the model a row takes."""
        return self.length + (self.virtual_tokens if self.method == "prefix" else 0)

    @cached_property
    def pretrained_base(self) -> BaseModel:
        """The base as this party has it, found when it is first needed."""
        found = find_base(self.base)
        if self.template is not None:
            found.tokenizer.chat_template = self.template
        return found

    @override
    def model(self) -> nn.Module:
        # The ranks of a silo's [cluster] ask for a model without weights, and read their parts themselves.
        empty = nn.Linear(1, 1).weight.is_meta
        if empty:
            self._check_ranks()
        found = self.pretrained_base
        found.check_length(self.length, self.positions)
        model: Any = found.form() if empty else found.load(self.precision)
        if not empty and self.precision != "nf4":  # What is in 4 bits works on a GPU alone.
            placed = self.packing and self.method != "prefix"
            check_rows(model, packed=placed and self.objective != "dpo", positions=placed)
        seed = torch.initial_seed()
        if self.method != "full":
            # By the job's seed alone, whatever the loading of a base may have drawn.
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = adapted(model, self.adapter_config())
        if self.method == "prefix":
            check_prefix(model)
        if self.method == "ffa_lora":
            for name, parameter in model.named_parameters():
                if ".lora_A." in name:
                    parameter.requires_grad_(False)
        if self.checkpointing and not empty:  # What ranks compute again is their plan's.
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.enable_input_require_grads()
        self._check_trained(model)
        pins = {name: nn.Parameter(value, requires_grad=False) for name, value in found.pins().items()}
        setattr(model, PINNED, nn.ParameterDict(pins))
        return model  # type: ignore[no-any-return]

    def pretrained(self, site: Site) -> Path:
        """The base's folder: the ranks of a silo's [cluster] read their parts out of its files."""
        return self.pretrained_base.folder

    def frozen_beside_pretrained(self) -> dict[str, Tensor]:
        """What is frozen and neither in the base's files nor drawn by the job's seed, by its names."""
        return {f"{PINNED}.{name}": value for name, value in self.pretrained_base.pins().items()}

    def _check_ranks(self) -> None:
        """TaskError for what the ranks of a silo's [cluster] would not train as one process does."""
        why = ""
        if self.method == "prefix":
            why = 'method = "prefix": layers that ranks compute again take no cache of keys and values'
        elif self.precision != "float32":
            why = f'precision = "{self.precision}": ranks share out parameters of one precision, float32'
        if why:
            raise TaskError(
                f"{type(self).__name__} at a silo with [cluster], {why}; train it in the one process of an "
                'agent without [cluster], or set method = "lora" and precision = "float32"'
            )

    def adapter_config(self) -> Any:
        """peft's configuration of what trains."""
        peft = library("peft")
        if self.method == "ia3":
            return peft.IA3Config(task_type="CAUSAL_LM", target_modules=self.targets)
        if self.method == "prefix":
            return peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=self.virtual_tokens)
        return peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=self.rank,
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            target_modules=self.targets,
            use_dora=self.method == "dora",
        )

    def _check_trained(self, model: Any) -> None:
        """What trains must be what an adapter's file holds: else an export would lack it."""
        if self.method == "full":
            return
        held = set(library("peft").get_peft_model_state_dict(model, save_embedding_layers=False))
        trained = {plain_name(name) for name, p in model.named_parameters() if p.requires_grad}
        if self.method == "ffa_lora":
            held = {name for name in held if ".lora_A." not in name}
        if embeddings := sorted(name for name in trained if ".lora_embedding_" in name):
            raise TaskError(
                f"targets = {self.targets!r}: {embeddings[0]!r} is a factor of an embedding's, which is "
                "neither frozen by ffa_lora nor merged by flora: choose linear layers as targets"
            )
        if trained != held:
            odd = sorted(trained ^ held)
            raise TaskError(
                f"targets = {self.targets!r}: {odd[0]!r} trains and is not what an adapter's file holds, or "
                "the other way round: choose linear layers as targets"
            )

    def texts(self, site: Site) -> tuple[Sequence[Text], Sequence[Text]]:
        """(training, test) texts of a site: a plain text each, or an object as a line of a .jsonl has it.

        Here of the files that `site.options` names: `file`, and `test_file` where the test texts are others.
        In a simulation the job's partition shares them out, by the key "label" of an object where it has one.
        Override it for data that lie elsewhere.
        """
        if not isinstance(site.options.get("file"), str):
            raise TaskError(
                'no data: name a .txt, .jsonl or .parquet file, as file = "…" in the silo\'s [data] table, '
                "or in [simulation.data] of the job"
            )
        found = read_texts(Path(site.options["file"]).expanduser())
        labels = [str(text.get("label", "")) if isinstance(text, dict) else "" for text in found]
        numbers = {label: number for number, label in enumerate(sorted(set(labels)))}
        own = [found[row] for row in site.shard([numbers[label] for label in labels])]
        if isinstance(site.options.get("test_file"), str):
            return own, read_texts(Path(site.options["test_file"]).expanduser())
        kept = round(len(own) * self.test_share)
        return own[: len(own) - kept], own[len(own) - kept :]

    @override
    def data(self, site: Site) -> tuple[Dataset, Dataset]:
        training, test = self.texts(site)
        return tuple(self.rows(training)), tuple(self.rows(test))

    def rows(self, texts: Sequence[Text]) -> TokenRows:
        """The texts as packed rows of tokens; preferences as two rows each."""
        found = self.pretrained_base
        found.check_length(self.length, self.positions)
        tokenizer, filler = found.tokenizer, int(found.tokenizer.eos_token_id)
        if self.objective == "dpo":
            pairs = (preference_of(tokenizer, text) for text in texts)
            return preference_rows(pairs, self.length, filler)
        tokens = (tokens_of(tokenizer, text, self.learn) for text in texts)
        return packed(tokens, self.length, filler, apart=self.method == "prefix" or not self.packing)

    @override
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The losses of all tokens that are learnt, summed, over the number of places in the batch's rows.

        A row is an example, and all rows are of one length: so each token weighs alike over batches, their
        parts and silos, whatever of a row is learnt. Of preferences the mean of equation 7, one weighing as
        another.
        """
        if self.objective == "dpo":
            return preference_loss(rewards(model, batch, self.beta, placed=self.packing))
        losses, _ = self._token_losses(model, batch)
        return losses.sum() / (len(batch[0]) * (self.length - 1))

    @override
    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[float | Tensor, int]]:
        """`token_perplexity` and `token_accuracy`, over the tokens that are learnt. Of preferences
        `reward_accuracy`, the share whose chosen answer has the higher reward, and `reward_margin`, the mean
        difference of the two rewards."""
        if self.objective == "dpo":
            found = rewards(model, batch, self.beta, placed=self.packing)
            margins = found[:, 0] - found[:, 1]
            return {
                "reward_accuracy": ((margins > 0).sum(), len(margins)),
                "reward_margin": (margins.sum(), len(margins)),
            }
        losses, right = self._token_losses(model, batch)
        return {**perplexity("token", losses), "token_accuracy": (right.sum(), len(losses))}

    def generated(
        self, model: nn.Module, data: Dataset, count: int, before_text: Callable[[], None] | None = None
    ) -> list[GeneratedText]:
        """What the model writes on from the beginnings of so many texts, in rows as `data` gives them.

        `before_text` is called before each, and may raise.
        """
        rows = tuple(data) if isinstance(data, tuple | list) else ()
        if len(rows) != len(TokenRows._fields):
            return []
        training = model.training
        model.eval()
        try:
            with torch.no_grad():
                return generated_texts(model, self.pretrained_base.tokenizer, rows, count, before_text)
        finally:
            model.train(training)

    @override
    def optimizer(  # type: ignore[override]
        self, parameters: Iterable[nn.Parameter], context: Context
    ) -> torch.optim.Optimizer:
        """AdamW at the job's learning rate."""
        first, second = self.betas
        return torch.optim.AdamW(
            parameters, lr=context.learning_rate, betas=(first, second), weight_decay=self.weight_decay
        )

    def _token_losses(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Of each token that is learnt: its loss in float32, and whether it was the likeliest."""
        tokens, labels, positions = batch
        logits = logits_of(model, tokens, positions if self.packing else None)[:, :-1]
        wanted = labels[:, 1:]
        learnt = wanted != IGNORED
        values, truth = logits[learnt].float(), wanted[learnt]
        return functional.cross_entropy(values, truth, reduction="none"), values.argmax(-1) == truth


def adapted(model: nn.Module, config: Any) -> Any:
    """peft's model over this one. What peft finds out and sets right by itself is not said.

    TaskError where the model has none of the modules that are to get adapters.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")
        warnings.filterwarnings("ignore", message=".*is deprecated.*", category=FutureWarning)
        warnings.filterwarnings("ignore", message="The PEFT config's `base_model_name_or_path` was renamed")
        try:
            return library("peft").get_peft_model(model, config)
        except (ValueError, KeyError) as error:
            raise TaskError(f"adapters do not fit this base: {error}") from error


def plain_name(name: str) -> str:
    """An adapter's tensor as its file names it: without the name that the adapter has in memory."""
    if name == PROMPT:
        return "prompt_embeddings"
    magnitude = ".lora_magnitude_vector.default.weight"
    if name.endswith(magnitude):
        return name.removesuffix(".default.weight")
    return name.replace(".default.", ".").removesuffix(".default")
