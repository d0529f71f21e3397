"""A task that fine-tunes a pretrained encoder of Hugging Face's libraries under a head of classes.

The head is Devlin et al. 2019 (section 4.1) for texts and pairs of them, Dosovitskiy et al. 2021 (section
3.1) for images: one vector for the whole, a linear layer, a softmax over the classes; for a regression one
number.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from roundtable.core.errors import ConfigError, TaskError
from roundtable.core.extras import load
from roundtable.core.foundation.base_model import BaseModel, find_base
from roundtable.core.foundation.checkpoint_files import CheckpointTensors
from roundtable.core.foundation.classifier_head import (
    ClassifierHead,
    Inputs,
    ProblemType,
    modules_of_head,
    unpublished_pooler,
)
from roundtable.core.foundation.labelled_rows import (
    CONTENT,
    LabelledImages,
    LabelledRow,
    LabelledTokens,
    PairTokens,
    check_labels,
    labelled_tokens,
    numbers_of,
    pixels_of,
    read_labelled,
)
from roundtable.core.foundation.logits_program import LogitsOf, Traceable
from roundtable.core.foundation.padding_check import check_images, check_padding
from roundtable.core.foundation.pretrained_task import PretrainedTask, check_choices, numbered
from roundtable.core.foundation.text_pairs import SEGMENTS, check_border, check_room
from roundtable.core.measures.measured import confusion, correlation, regression
from roundtable.core.task import Dataset, Site

Method = Literal["lora", "ffa_lora", "dora", "ia3", "full"]
Precision = Literal["float32", "bfloat16", "float16"]
_log = logging.getLogger(__name__)
_MOST_COUNTED = 16
"""Classes whose confusion is counted: a family of metrics has 256 cells at most."""


class HuggingFaceClassifier(PretrainedTask):
    """Fine-tunes a pretrained encoder under a head of classes; nothing but what trains travels.

    `labels` names the classes in the order that all silos have. `base`, `method` and the settings of adapters
    are those of `HuggingFaceTask`; the head trains whole with each of them, and so does a pooler that the
    base was published without. What of both is not in the base's files is drawn by the job's seed. `length`
    is the most tokens of a row, its special ones among them (None: 512). `inputs` says what is classified,
    "text", "pairs" of texts, or "images"; with `fresh_head` the head is drawn also where the base has one.
    With `problem_type` = "regression" rows have a number as their label, which the one of `labels` names.
    """

    def __init__(
        self,
        base: str,
        labels: list[str],
        length: int | None = None,
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
        inputs: Inputs = "text",
        fresh_head: bool = False,
        problem_type: ProblemType = "single_label_classification",
    ) -> None:
        check_choices(
            {
                "method": (method, Method),
                "precision": (precision, Precision),
                "inputs": (inputs, Inputs),
                "problem_type": (problem_type, ProblemType),
            }
        )
        if inputs == "images" and length is not None:
            raise ConfigError(
                f'task: length = {length} with inputs = "images": an image has the size that the base\'s '
                "processor gives it; leave length out",
                key=("task", "length"),
            )
        super().__init__(
            base,
            512 if length is None else length,
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
        self.labels = check_labels(labels, problem_type)
        self.inputs: Inputs = inputs
        self.fresh_head = fresh_head
        self.problem_type: ProblemType = problem_type

    @cached_property
    @override
    def pretrained_base(self) -> BaseModel:
        head = ClassifierHead(self.labels, self.inputs, self.fresh_head, self.problem_type)
        return find_base(self.base, head)

    @property
    @override
    def takes(self) -> tuple[str, ...]:
        if self.inputs == "images":
            return ("pixel_values",)
        return ("input_ids", "attention_mask", *((SEGMENTS,) if self._segments else ()))

    @cached_property
    def _segments(self) -> bool:
        """Whether the model is told which tokens are of a pair's second text."""
        return self.inputs == "pairs" and self.pretrained_base.segments

    @override
    def model(self) -> nn.Module:
        found, images = self.pretrained_base, self.inputs == "images"
        if nn.Linear(1, 1).weight.is_meta:  # The ranks of a silo's [cluster] read their parts themselves.
            self._check_ranks()
            model: Any = found.form()
            whole = modules_of_head(model, unpublished_pooler(model, CheckpointTensors(found.folder)))
        elif images:
            blank = self._blank()
            model, whole = found.load_classifier(self.precision)
            check_images(model, blank)
        else:
            found.check_length(self.length, self.length)
            filler = int(found.tokenizer.pad_token_id)
            check_room(found.tokenizer, self.length, self.inputs == "pairs")
            if self.inputs == "pairs":
                check_border(found.tokenizer, self._segments)
            model, whole = found.load_classifier(self.precision)
            check_padding(model, self.length, filler)
        # peft names no type of task for images.
        kind = None if images else "SEQ_CLS"
        return self.prepared(model, None if self.method == "full" else self.adapter_config(kind, whole))

    def _check_ranks(self) -> None:
        """TaskError for what the ranks of a silo's [cluster] would not train as one process does."""
        if self.precision != "float32":
            raise TaskError(
                f'{type(self).__name__} at a silo with [cluster], precision = "{self.precision}": ranks '
                "share out parameters of one precision, float32, which a head has anyway; train it in the "
                'one process of an agent without [cluster], or set precision = "float32"'
            )

    def _blank(self) -> Tensor:
        """A grey image as the base's processor makes it: float32 [channels, height, width]."""
        pillow: Any = load("PIL.Image", "reading images")
        return pixels_of(self.pretrained_base.image_processor, pillow.new("RGB", (96, 64), (128, 96, 64)))

    def rows(self, site: Site) -> tuple[Sequence[LabelledRow], Sequence[LabelledRow]]:
        """(training, test) rows of a site, each of a text, a pair of texts, or an image's path or bytes, and
        its label: one of `labels`, or a number.

        Of the files that `site.options` names: `file` and, where the test rows are others, `test_file`;
        `text` and `text_pair`, or `image`, and `label` say how their columns are called there.

        In a simulation the job's partition shares them out by their labels; numbers by their tenths.
        Override it for data that lie elsewhere.
        """
        content = tuple(str(site.options.get(name, name)) for name in CONTENT[self.inputs])
        label = str(site.options.get("label", "label"))

        def read(path: Path) -> list[LabelledRow]:
            return read_labelled(path, self.labels, content, label, self.inputs, self.problem_type)

        training, test = self._shared_out(site, read, self._parts)
        if len({label for _, label in test}) == 1 < min(len(test), len({label for _, label in training})):
            _log.warning(
                "all %d rows that are kept for tests, the last ones, have one label, and others have more: "
                "shuffle the file, or name a test_file beside it",
                len(test),
            )
        return training, test

    def _parts(self, rows: Sequence[LabelledRow]) -> list[int]:
        if self.problem_type != "regression":
            return numbered([str(label) for _, label in rows])
        parts = [0] * len(rows)
        for rank, row in enumerate(sorted(range(len(rows)), key=lambda row: float(rows[row][1]))):
            parts[row] = 10 * rank // len(rows)
        return parts

    @override
    def data(self, site: Site) -> tuple[Dataset, Dataset]:
        training, test = self.rows(site)
        if self.inputs != "images":
            return tuple(self.tokens(training)), tuple(self.tokens(test))
        processor = self.pretrained_base.image_processor
        return tuple(  # type: ignore[return-value]
            LabelledImages(processor, part, numbers_of(part, self.labels, self.problem_type))
            for part in (training, test)
        )

    def tokens(self, rows: Sequence[LabelledRow]) -> LabelledTokens | PairTokens:
        """The rows as tokens, each filled up to `length`."""
        numbers, pairs = numbers_of(rows, self.labels, self.problem_type), self.inputs == "pairs"
        tokenizer = self.pretrained_base.tokenizer
        return labelled_tokens(tokenizer, rows, numbers, self.length, pairs, self._segments)

    @override
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean cross-entropy over the rows; of a regression the mean squared error."""
        if self.problem_type == "regression":
            return functional.mse_loss(self.logits(model, batch)[:, 0], batch[-1])
        return functional.cross_entropy(self.logits(model, batch), batch[-1])

    @override
    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[float | Tensor, int]]:
        """`accuracy`, and, of up to 16 labels, the figures of `rt.metrics.confusion` as label_…; of a
        regression those of `rt.metrics.regression` and `rt.metrics.correlation`."""
        if self.problem_type == "regression":
            value = self.logits(model, batch)[:, 0]
            return {**regression("label", value, batch[-1]), **correlation("label", value, batch[-1])}
        guess, truth = self.logits(model, batch).argmax(-1), batch[-1]
        found: dict[str, tuple[float | Tensor, int]] = {"accuracy": ((guess == truth).sum(), len(truth))}
        if len(self.labels) <= _MOST_COUNTED:
            found |= confusion("label", guess, truth, len(self.labels))
        return found

    def logits(self, model: nn.Module, batch: Any) -> Tensor:
        """float32 [rows, labels], of a batch as `data` gives it."""
        if self.inputs == "images":
            seen: Any = model(pixel_values=batch[0].to(_dtype_of(model)))
            return seen.logits.float()  # type: ignore[no-any-return]
        tokens, mask = batch[0], batch[1]
        # What all rows are filled up with says nothing, and takes time; a trace has no values to count.
        most = tokens.shape[1] if type(mask) is not Tensor or mask.is_meta else max(1, _longest(mask))
        told = {SEGMENTS: batch[2][:, :most]} if self._segments else {}
        made: Any = model(input_ids=tokens[:, :most], attention_mask=mask[:, :most], **told)
        return made.logits.float()  # type: ignore[no-any-return]

    @override
    def opened_by(self, base: str) -> str:
        names = dict(enumerate(self.labels))
        more = ", ignore_mismatched_sizes=True" if self.fresh_head else ""
        more += ', problem_type="regression"' if self.problem_type == "regression" else ""
        return f'{self.pretrained_base.auto}.from_pretrained("{base}", id2label={names}{more})'

    @override
    def described(self) -> str:
        count = len(self.labels)
        what = "one number" if self.problem_type == "regression" else f"{count} labels"
        return f"{super().described()}, and a head of {what}: {', '.join(self.labels)}"

    @override
    def traceable(self, model: nn.Module) -> Traceable:
        """`input_ids`, `attention_mask` and, of pairs where the model takes them, `token_type_ids`, int64
        [rows, tokens], or `pixel_values`, float32 [images, channels, height, width] → logits [rows,
        labels]."""
        chance = torch.Generator().manual_seed(0)
        if self.inputs == "images":
            pixels = torch.randn(5, *self._blank().shape, generator=chance)
            one, other = ({"pixel_values": part} for part in (pixels[:2], pixels[2:]))
            return Traceable(LogitsOf(model, self.takes), one, other, {0: "images"})
        size = int(self.pretrained_base.config.vocab_size)

        def inputs(rows: int, tokens: int) -> dict[str, Tensor]:
            mask = torch.ones(rows, tokens, dtype=torch.int64)
            mask[0, tokens - 2 :] = 0
            ids = torch.randint(size, (rows, tokens), generator=chance)
            found = {"input_ids": ids, "attention_mask": mask}
            return found | ({SEGMENTS: ids % 2} if self._segments else {})

        # One text has one segment, which BERT's kind looks up: torch writes that look-up of a buffer wrongly.
        # Others make something of zeros that they do not make of nothing.
        looked_up = getattr(self.pretrained_base.config, "type_vocab_size", 0) > 0
        given = not self._segments and looked_up and SEGMENTS in signature(model.forward).parameters
        module = LogitsOf(model, self.takes, (SEGMENTS,) if given else ())
        return Traceable(module, inputs(2, 5), inputs(3, 8), {0: "rows", 1: "tokens"})


def _longest(mask: Tensor) -> int:
    return int(mask.sum(1).max()) if len(mask) else 0


def _dtype_of(model: nn.Module) -> torch.dtype:
    """Of the frozen base, which is before the head."""
    return next(p.dtype for p in model.parameters() if p.is_floating_point())
