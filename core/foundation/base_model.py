"""The pretrained model that each party has already: found, read without a network, and pinned.

Nothing is ever downloaded: a name is a folder, or a model that lies in the library's own cache.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor, nn

from roundtable.core.errors import EncodingError, TaskError
from roundtable.core.extras import load
from roundtable.core.foundation.checkpoint_files import CheckpointTensors, advice_on_pickles
from roundtable.core.foundation.classifier_head import (
    ClassifierHead,
    check_loaded,
    draw,
    in_float32,
    modules_of_head,
)
from roundtable.core.foundation.four_bits import PRECISION as FOUR_BITS
from roundtable.core.foundation.four_bits import check_four_bits, four_bits, pin_scales
from roundtable.core.foundation.text_pairs import read_otherwise, takes_segments
from roundtable.core.machine.process_facts import group_limit, physical_memory

BASES = "ROUNDTABLE_BASES"
"""The environment variable that names folders of models: a base is looked for below them, and nowhere else
but in the library's cache. An agent sets it by its [policy] bases."""
PURPOSE = "fine-tuning a pretrained model"
ADAPTER_CONFIG = "adapter_config.json"
_TOKENS = "tokenizer.json"
_IMAGES = "preprocessor_config.json"
_SAMPLE = " A first LINE,  two spaces.\n\tDon't say\u0301 É ﬁ 12345 — 東京 🙂"
"""Where tokenizers of one file differ by their settings: cases, spaces, accents, digits, what is added."""
_NOTHING_FOREIGN: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
"""For transformers: no network, and no code beside the model, which it would ask for at a terminal."""
_NOT_OF_THE_MODEL = ("transformers_version", "torch_dtype", "dtype", "_name_or_path", "use_cache")
_NOT_OF_A_CLASSIFIER = (*_NOT_OF_THE_MODEL, "id2label", "label2id", "num_labels", "problem_type")
_OF_CALLS = ("padding", "truncation")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_DTYPES[FOUR_BITS] = torch.bfloat16
_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, FOUR_BITS: 0.5}
"""Of a weight, at least."""


def library(name: str) -> Any:
    """`transformers` or `peft`, told to use no network; ConfigError with the extra where it is missing."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Both import torchao where that is installed, which warns of each kernel that this machine cannot use.
    for other in ("torchao", "torch.utils._pytree"):
        logging.getLogger(other).setLevel(logging.ERROR)
    module = load(name, PURPOSE)
    if name == "transformers":
        module.utils.logging.disable_progress_bar()
    return module


@dataclass(frozen=True)
class BaseModel:
    """A model of a folder, with what reads its inputs: a causal language model with its tokenizer, or, with a
    `head`, an encoder under a head of classes."""

    name: str
    folder: Path
    head: ClassifierHead | None = None

    @cached_property
    def config(self) -> Any:
        """What the model is made of, with the head's labels. TaskError for a head of others in the base."""
        if self.head is None:
            return self._published
        if self.head.is_in(self._published):
            with self._named():
                self.head.check_labels(self._published)
        return self.head.configured(self._published)

    @cached_property
    def _published(self) -> Any:
        if (self.folder / ADAPTER_CONFIG).exists():
            raise TaskError(
                f"base {self.name!r}: its folder holds an adapter as well ({ADAPTER_CONFIG}), which "
                "transformers would put over a base of its own choice: move it elsewhere"
            )
        try:
            config: Any = library("transformers").AutoConfig.from_pretrained(self.folder, **_NOTHING_FOREIGN)
        except Exception as error:  # The library's own are of any class.
            raise TaskError(f"base {self.name!r}: its config.json cannot be used: {error}") from error
        if (quantised := getattr(config, "quantization_config", None)) is not None:
            told: Any = quantised if isinstance(quantised, dict) else vars(quantised)
            raise TaskError(
                f"base {self.name!r}: its weights are quantised ({told.get('quant_method', 'unknown')}, by "
                "quantization_config of config.json): take the base that they were made of, with "
                f'precision = "{FOUR_BITS}" where it is to be in 4 bits'
            )
        if (self.head is None or self.head.inputs != "images") and config.get_text_config() is not config:
            raise TaskError(
                f"base {self.name!r}: a {config.model_type} takes more than text: take the model of text "
                "alone, saved by itself"
            )
        return config

    @cached_property
    def tokenizer(self) -> Any:
        """A fast tokenizer that knows how a text ends, or, for a head of classes, what fills up a row.
        TaskError for others."""
        if not (self.folder / _TOKENS).is_file():
            raise TaskError(
                f"base {self.name!r}: its tokenizer has no {_TOKENS}, which is pinned: "
                "`AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)` of transformers writes it"
            )
        try:
            found = library("transformers").AutoTokenizer.from_pretrained(self.folder, **_NOTHING_FOREIGN)
        except Exception as error:  # The library's own are of any class.
            raise TaskError(f"base {self.name!r}: its tokenizer cannot be used: {error}") from error
        if not found.is_fast:
            raise TaskError(f"base {self.name!r}: its tokenizer is not the fast one of {_TOKENS}")
        if self.head is not None and found.pad_token_id is None:
            raise TaskError(
                f"base {self.name!r}: its tokenizer names no token that fills up a row (pad_token), so that "
                "texts of unlike lengths cannot be in one batch: name one in tokenizer_config.json, and as "
                "pad_token_id in config.json"
            )
        if self.head is None and found.eos_token_id is None:
            raise TaskError(
                f"base {self.name!r}: its tokenizer names no token that ends a text (eos_token), so that a "
                "model could not learn to stop"
            )
        if len(found) > self.config.vocab_size:
            raise TaskError(
                f"base {self.name!r}: its tokenizer has {len(found)} tokens and its model "
                f"{self.config.vocab_size}: they are not of one model"
            )
        return found

    @cached_property
    def segments(self) -> bool:
        """Whether the two texts of a row under a head are told apart by numbers that its model looks up."""
        kinds = library("transformers").MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
        return takes_segments(self.tokenizer, self.config, kinds[type(self.config)])

    @cached_property
    def image_processor(self) -> Any:
        """What makes an image the tensor that the model takes, by Pillow alone. TaskError where it has none,
        ConfigError with the extra where Pillow is missing."""
        load("PIL.Image", "reading images")
        if not (self.folder / _IMAGES).is_file():
            raise TaskError(f"base {self.name!r}: it has no {_IMAGES}, which says how images are read")
        transformers = library("transformers")
        # Releases 4 and 5 name it otherwise. What torchvision makes of an image is another tensor.
        plain = {"use_fast": False} if transformers.__version__.startswith("4.") else {"backend": "pil"}
        try:
            return transformers.AutoImageProcessor.from_pretrained(self.folder, **plain, **_NOTHING_FOREIGN)
        except Exception as error:  # The library's own are of any class.
            raise TaskError(f"base {self.name!r}: its image processor cannot be used: {error}") from error

    def _processor_digest(self) -> dict[str, str]:
        # The processor of its file: in memory it changes with its first call.
        told = json.loads((self.folder / _IMAGES).read_text(encoding="utf-8"))
        kept = {name: value for name, value in told.items() if not name.endswith(("_type", "_class"))}
        return {"image_processor": _digest(kept)}

    def save_reader(self, folder: Path) -> None:
        """Writes what reads its inputs beside a model that was made of it."""
        images = self.head is not None and self.head.inputs == "images"
        reader = self.image_processor if images else self.tokenizer
        reader.name_or_path = ""
        if self.head is not None and not images:  # As rows were filled up in training.
            reader.padding_side = "right"
        reader.save_pretrained(folder)

    def check_length(self, length: int, positions: int) -> None:
        """TaskError for more positions than the model was made for: some models would say nothing.

        `positions` are those that a row of `length` tokens takes, a prefix before it among them.
        """
        most = getattr(self.config, "max_position_embeddings", None)
        if most is not None and positions > most:
            before = f" and {positions - length} virtual tokens before it" if positions > length else ""
            raise TaskError(
                f"length = {length}{before}: the base {self.name!r} has {most} positions; set length to "
                f"{max(0, most - positions + length)} or less"
            )

    @cached_property
    def values(self) -> int:
        """How many values its weights have, by the heads of its safetensors files; 0 where there are none."""
        try:
            return sum(map(prod, CheckpointTensors(self.folder).sizes().values()))
        except EncodingError:
            return 0  # What is wrong, loading says.

    def check_memory(self, precision: str) -> None:
        """TaskError where the weights alone are more than this machine, or the group of processes, may hold;
        with what would fit."""
        known = [each for each in (physical_memory(), group_limit()) if each is not None]
        most = min(known, default=None)
        if most is None or self.values * _BYTES[precision] <= most:
            return
        fitting = [
            f'precision = "{name}" ({self.values * size / 1e9:.3g} GB)'
            for name, size in _BYTES.items()
            if self.values * size <= most and size < _BYTES[precision]
        ]
        taken = self.values * _BYTES[precision] / 1e9
        raise TaskError(
            f"base {self.name!r}: its {self.values:,} weights take {taken:.3g} GB in {precision}, and this "
            f"machine has {most / 1e9:.3g} GB for them; "
            + (f"{' or '.join(fitting)} would fit" if fitting else "no precision fits: take a smaller base")
        )

    def form(self) -> nn.Module:
        """The model without its weights, float32: where parameters take no memory, it takes none."""
        try:
            made = getattr(library("transformers"), self.auto).from_config(
                self.config, dtype=torch.float32, trust_remote_code=False
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise TaskError(f"base {self.name!r} cannot be made: {error}") from error
        return made  # type: ignore[no-any-return]

    def load(self, precision: str) -> nn.Module:
        """The model with its weights, all there and all finite. TaskError otherwise."""
        model, told = self._read(precision)
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if names := sorted(map(str, told.get(kind, ()))):
                raise TaskError(
                    f"base {self.name!r}: its weights are not those of its config.json: {len(names)} "
                    f"{kind.replace('_keys', '')}, such as {names[0]}"
                )
        self._check_finite(model, precision)
        if precision == FOUR_BITS:
            pin_scales(model)
        return model  # type: ignore[no-any-return]

    def load_classifier(self, precision: str) -> tuple[nn.Module, list[str]]:
        """The model under its head, and the names of the modules that train whole, which are float32.

        What the base's files lack of them is drawn by torch's seed. TaskError for a base that is not whole,
        and for a head in it whose labels are others.
        """
        assert self.head is not None
        config = self.config
        # A fresh head may have other classes than the base's own.
        model, told = self._read(precision, config=config, ignore_mismatched_sizes=self.head.fresh)
        with self._named():
            fresh = check_loaded(model, told, self.head.is_in(self._published), self.head.fresh)
            if not fresh:
                self.head.check_labels(self._published)
            modules = modules_of_head(model, fresh)
            if _DTYPES[precision] != torch.float32:
                in_float32(model, modules)
            draw(model, fresh)
        self._check_finite(model, precision)
        return model, modules

    def _read(self, precision: str, **how: Any) -> tuple[Any, dict[str, Any]]:
        self.check_memory(precision)
        transformers = library("transformers")
        if precision == FOUR_BITS:
            check_four_bits()
            how |= four_bits(transformers)
        level = transformers.logging.get_verbosity()
        if self.head is not None:  # A table of what is fresh, which is said where it matters.
            transformers.logging.set_verbosity_error()
        try:
            return getattr(transformers, self.auto).from_pretrained(  # type: ignore[no-any-return]
                self.folder,
                dtype=_DTYPES[precision],
                use_safetensors=True,
                output_loading_info=True,
                **_NOTHING_FOREIGN,
                **how,
            )
        except Exception as error:  # The library's own, and those of safetensors, are of any class.
            told = f"{error}{advice_on_pickles(self.folder)}"
            raise TaskError(f"base {self.name!r} cannot be loaded: {told}") from error
        finally:
            transformers.logging.set_verbosity(level)

    def _check_finite(self, model: nn.Module, precision: str) -> None:
        for name, value in model.state_dict().items():
            if value.is_floating_point() and not bool(value.isfinite().all()):
                raise TaskError(
                    f"base {self.name!r}: {name!r} holds NaN or infinity in {precision}; another precision, "
                    "or another copy of the file, may help"
                )

    @property
    def auto(self) -> str:
        """The class of transformers that loads it."""
        return "AutoModelForCausalLM" if self.head is None else self.head.auto

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except TaskError as error:
            raise TaskError(f"base {self.name!r}: {error}") from error

    def pins(self) -> dict[str, Tensor]:
        """What all parties must have alike beside weights. The digest is in a tensor's name, which a layout
        holds whatever its rule: a value would travel with [model] travel = "all", and be everybody's."""
        head = self.head
        version = library("transformers").__version__.partition(".")[0]
        told = _without(self.config.to_dict(), _NOT_OF_THE_MODEL if head is None else _NOT_OF_A_CLASSIFIER)
        images = head is not None and head.inputs == "images"
        read = self._processor_digest() if images else self._tokenizer_digests()
        pinned = {**read, "model_config": _digest(told), "transformers": version}
        if head is not None:
            one = head.problem_type == "single_label_classification"
            pinned["labels"] = _digest(head.labels if one else [head.labels, head.problem_type])
        return {f"{name}_{value}": torch.ones(1) for name, value in pinned.items()}

    def _tokenizer_digests(self) -> dict[str, str]:
        # A call with padding or truncation writes that into tokenizer.json; neither says what a token is.
        tokenizer = self.tokenizer
        tokens = json.loads((self.folder / _TOKENS).read_text(encoding="utf-8"))
        special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
        # What tokenizer_config.json makes of that file: beginnings and ends, tokens that are added.
        sample = " ".join([_SAMPLE, *(value for _, value in sorted(special.items()))])
        made = [tokenizer(sample)["input_ids"], tokenizer.get_added_vocab()]
        if self.head is not None:
            made += read_otherwise(tokenizer, sample, self.head.inputs == "pairs")
        return {
            "tokenizer": _digest([_without(tokens, _OF_CALLS), made]),
            "special_tokens": _digest(special),
            "chat_template": _digest(tokenizer.chat_template),
        }


def find_base(name: str, head: ClassifierHead | None = None) -> BaseModel:
    """The base by its name below a folder of $ROUNDTABLE_BASES, or in the library's cache; where that is not
    set, also by its folder's path.

    At a silo another party chooses the name: with the variable set it reaches no other folder. TaskError
    where this party does not have it.
    """
    homes, plain = os.environ.get(BASES), Path(name)
    inside = not plain.is_absolute() and ".." not in plain.parts
    if homes is None or not homes.strip():
        tried = [plain.expanduser()]
    else:
        tried = _below([Path(home) for home in homes.split(os.pathsep) if home], plain, inside)
    for folder in tried:
        if (folder / "config.json").is_file():
            return BaseModel(name, folder.resolve(), head)
    cached = None if not inside or len(plain.parts) > 2 else _cached(name)
    if cached is None:
        raise TaskError(
            f"base {name!r} is not here: no folder of that name with a config.json"
            + (f" below {BASES} ([policy] bases of a silo), and no other is looked into" if homes else "")
            + ", and not in the cache of Hugging Face. Nothing is downloaded by a job: "
            + (
                f"`hf download {name}` does it, or name a folder"
                if inside and len(plain.parts) <= 2
                else "have the model's folder there"
            )
        )
    return BaseModel(name, cached, head)


def _below(homes: Sequence[Path], plain: Path, inside: bool) -> list[Path]:
    """Where a name may mean; a whole path only where it is that of a folder below one of these."""
    if inside:
        return [home / plain for home in homes]
    whole = plain.resolve()
    allowed = plain.is_absolute() and any(whole.is_relative_to(home.resolve()) for home in homes)
    return [whole] if allowed else []


def _cached(name: str) -> Path | None:
    hub: Any = load("huggingface_hub", PURPOSE)
    try:
        return Path(hub.snapshot_download(name, local_files_only=True))
    except (OSError, ValueError):
        return None


def _without(values: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in keys}


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return blake3(text.encode()).hexdigest(16)
