"""A task that fine-tunes a causal language model of Hugging Face's libraries.

Prefix tuning is Li and Liang 2021 (section 4.2, without its reparametrisation); DPO Rafailov et al. 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from roundtable.core.errors import ConfigError, TaskError
from roundtable.core.foundation.base_model import BaseModel, library
from roundtable.core.foundation.generated_texts import GeneratedText, generated_texts
from roundtable.core.foundation.logits_program import Traceable, next_tokens
from roundtable.core.foundation.preferences import (
    preference_loss,
    preference_of,
    preference_rows,
    rewards,
)
from roundtable.core.foundation.prefix import check_prefix
from roundtable.core.foundation.pretrained_task import AnyPrecision, PretrainedTask, check_choices, numbered
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
from roundtable.core.task import Dataset, Site

Method = Literal["lora", "ffa_lora", "dora", "ia3", "prefix", "full"]
Objective = Literal["sft", "dpo"]


class HuggingFaceTask(PretrainedTask):
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
        precision: AnyPrecision = "float32",
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
        check_choices(
            {
                "method": (method, Method),
                "precision": (precision, AnyPrecision),
                "learn": (learn, Learn),
                "objective": (objective, Objective),
            }
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
        if objective == "dpo" and (method == "full" or not beta > 0):
            raise ConfigError(
                f'task: objective = "dpo" with method = {method!r} and beta = {beta}: it compares with the '
                'base, which every method but "full" leaves beside what trains, and beta must be above 0',
                key=("task", "objective"),
            )
        super().__init__(
            base,
            length,
            method,
            rank,
            alpha,
            dropout,
            targets,
            precision,
            checkpointing,
            test_share,
            betas,
            weight_decay,
        )
        # The rows of a preference's two answers.
        self.example_tokens = 2 * length if objective == "dpo" else length
        self.learn: Learn = learn
        self.template = template
        self.objective: Objective = objective
        self.beta = beta
        self.virtual_tokens = virtual_tokens
        self.packing = packing

    @property
    def positions(self) -> int:
        """How many positions of the model a row takes."""
        return self.length + (self.virtual_tokens if self.method == "prefix" else 0)

    @cached_property
    @override
    def pretrained_base(self) -> BaseModel:
        found = super().pretrained_base
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
        made = self.prepared(model, None if self.method == "full" else self._adapters())
        if self.method == "prefix":
            check_prefix(made)
        return made

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

    def _adapters(self) -> Any:
        if self.method != "prefix":
            return self.adapter_config("CAUSAL_LM")
        peft = library("peft")
        return peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=self.virtual_tokens)

    @property
    @override
    def inseparable(self) -> str:
        if self.objective == "dpo":
            return 'objective = "dpo", whose example is two rows of one batch: set objective = "sft"'
        return super().inseparable

    @override
    def described(self) -> str:
        prefix = f" of {self.virtual_tokens} virtual tokens" if self.method == "prefix" else ""
        return (
            super().described() + prefix + (f"; DPO, beta {self.beta:g}" if self.objective == "dpo" else "")
        )

    @override
    def traceable(self, model: nn.Module) -> Traceable:
        return next_tokens(model)

    def texts(self, site: Site) -> tuple[Sequence[Text], Sequence[Text]]:
        """(training, test) texts of a site: a plain text each, or an object as a line of a .jsonl has it.

        Here of the files that `site.options` names: `file`, and `test_file` where the test texts are others.
        In a simulation the job's partition shares them out, by the key "label" of an object where it has one.
        Override it for data that lie elsewhere.
        """
        return self._shared_out(site, read_texts, lambda texts: numbered([_label_of(text) for text in texts]))

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

    def _token_losses(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Of each token that is learnt: its loss in float32, and whether it was the likeliest."""
        tokens, labels, positions = batch
        logits = logits_of(model, tokens, positions if self.packing else None)[:, :-1]
        wanted = labels[:, 1:]
        learnt = wanted != IGNORED
        values, truth = logits[learnt].float(), wanted[learnt]
        return functional.cross_entropy(values, truth, reduction="none"), values.argmax(-1) == truth


def _label_of(text: Text) -> str:
    return str(text.get("label", "")) if isinstance(text, dict) else ""
