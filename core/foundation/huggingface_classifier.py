"""A task that fine-tunes a pretrained encoder of Hugging Face's libraries under a head of classes.

The head is Devlin et al. 2019 (section 4.1) for texts: one vector for the whole row, a linear layer, a
softmax over the classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from inspect import signature
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from roundtable.core.errors import TaskError
from roundtable.core.foundation.base_model import BaseModel, find_base
from roundtable.core.foundation.classifier_head import ClassifierHead
from roundtable.core.foundation.labelled_rows import (
    LabelledRow,
    LabelledTokens,
    check_labels,
    labelled_tokens,
    read_labelled,
)
from roundtable.core.foundation.logits_program import LogitsOf, Traceable
from roundtable.core.foundation.padding_check import check_padding
from roundtable.core.foundation.pretrained_task import PretrainedTask, check_choices
from roundtable.core.measures.measured import confusion
from roundtable.core.task import Dataset, Site

Method = Literal["lora", "ffa_lora", "dora", "ia3", "full"]
Precision = Literal["float32", "bfloat16", "float16"]
_MOST_COUNTED = 16
"""Classes whose confusion is counted: a family of metrics has 256 cells at most."""


class HuggingFaceClassifier(PretrainedTask):
    """Fine-tunes a pretrained encoder of texts under a head of classes; nothing but what trains travels.

    `labels` names the classes in the order that all silos have. `base`, `method` and the settings of adapters
    are those of `HuggingFaceTask`; the head trains whole with each of them, and so does a pooler that the
    base was published without. What of both is not in the base's files is drawn by the job's seed. `length`
    is the most tokens of a text, its special ones among them.
    """

    inputs = ("input_ids", "attention_mask")

    def __init__(
        self,
        base: str,
        labels: list[str],
        length: int = 512,
        method: Method = "lora",
        rank: int = 8,
        alpha: float = 16.0,
        dropout: float = 0.0,
        targets: list[str] | str | None = None,
        precision: Precision = "float32",
        checkpointing: bool = False,
        test_share: float = 0.1,
        betas: Sequence[float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        check_choices({"method": (method, Method), "precision": (precision, Precision)})
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
        self.labels = check_labels(labels)

    @cached_property
    @override
    def pretrained_base(self) -> BaseModel:
        return find_base(self.base, ClassifierHead(self.labels, "text"))

    @override
    def model(self) -> nn.Module:
        if nn.Linear(1, 1).weight.is_meta:
            raise TaskError(
                f"{type(self).__name__} at a silo with [cluster]: which parts of its head are fresh is known "
                "once the base's weights are read, and ranks make the model without them; train it in the "
                "one process of an agent without [cluster]"
            )
        found = self.pretrained_base
        found.check_length(self.length, self.length)
        filler = int(found.tokenizer.pad_token_id)
        model, whole = found.load_classifier(self.precision)
        check_padding(model, self.length, filler)
        config = None if self.method == "full" else self.adapter_config("SEQ_CLS", whole)
        return self.prepared(model, config)

    def rows(self, site: Site) -> tuple[Sequence[LabelledRow], Sequence[LabelledRow]]:
        """(training, test) rows (text, label) of a site, of the files that `site.options` names: `file`
        and, where the test rows are others, `test_file`; `text` and `label` say how their columns are called
        there.

        In a simulation the job's partition shares them out by their labels. Override it for data that lie
        elsewhere.
        """
        names = [str(site.options.get(name, name)) for name in ("text", "label")]
        return self._shared_out(
            site, lambda path: read_labelled(path, self.labels, *names), lambda row: row[1]
        )

    @override
    def data(self, site: Site) -> tuple[Dataset, Dataset]:
        training, test = self.rows(site)
        return tuple(self.tokens(training)), tuple(self.tokens(test))

    def tokens(self, rows: Sequence[LabelledRow]) -> LabelledTokens:
        """The rows as tokens, each filled up to `length`."""
        return labelled_tokens(self.pretrained_base.tokenizer, rows, self.labels, self.length)

    @override
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean cross-entropy over the rows."""
        return functional.cross_entropy(self.logits(model, batch), batch[2])

    @override
    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[float | Tensor, int]]:
        """`accuracy`, and, of up to 16 labels, the figures of `rt.metrics.confusion` as label_…."""
        guess, truth = self.logits(model, batch).argmax(-1), batch[2]
        found: dict[str, tuple[float | Tensor, int]] = {"accuracy": ((guess == truth).sum(), len(truth))}
        if len(self.labels) <= _MOST_COUNTED:
            found |= confusion("label", guess, truth, len(self.labels))
        return found

    def logits(self, model: nn.Module, batch: Any) -> Tensor:
        """float32 [rows, labels], of a batch as `data` gives it."""
        tokens, mask = batch[0], batch[1]
        # What all rows are filled up with says nothing, and takes time.
        most = max(1, int(mask.sum(1).max())) if len(mask) else 1
        made: Any = model(input_ids=tokens[:, :most], attention_mask=mask[:, :most])
        return made.logits.float()  # type: ignore[no-any-return]

    @override
    def opened_by(self, base: str) -> str:
        names = dict(enumerate(self.labels))
        return f'{self.pretrained_base.auto}.from_pretrained("{base}", id2label={names})'

    @override
    def described(self) -> str:
        return f"{super().described()}, and a head of {len(self.labels)} labels: {', '.join(self.labels)}"

    @override
    def traceable(self, model: nn.Module) -> Traceable:
        """`input_ids` and `attention_mask`, int64 [rows, tokens] → logits [rows, labels]."""
        chance = torch.Generator().manual_seed(0)
        size = int(self.pretrained_base.config.vocab_size)

        def inputs(rows: int, tokens: int) -> dict[str, Tensor]:
            mask = torch.ones(rows, tokens, dtype=torch.int64)
            mask[0, tokens - 2 :] = 0
            return {
                "input_ids": torch.randint(size, (rows, tokens), generator=chance),
                "attention_mask": mask,
            }

        # One text has one segment, which BERT's kind looks up: torch writes that look-up of a buffer wrongly.
        segments = ("token_type_ids",) if "token_type_ids" in signature(model.forward).parameters else ()
        module = LogitsOf(model, self.inputs, segments)
        return Traceable(module, inputs(2, 5), inputs(3, 8), {0: "rows", 1: "tokens"})
