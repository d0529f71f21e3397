"""Rows with a label: read from files, checked, and brought to numbers that all silos understand alike."""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset
from typing_extensions import override

from roundtable.core.errors import ConfigError, TaskError
from roundtable.core.extras import load
from roundtable.core.foundation.classifier_head import Inputs, ProblemType
from roundtable.core.foundation.text_files import objects_of
from roundtable.core.foundation.text_pairs import SEGMENTS, TRUNCATION

CONTENT = {"text": ("text",), "pairs": ("text", "text_pair"), "images": ("image",)}
"""What the parts of a row's content are called, where a silo does not say otherwise."""
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Of Pillow's: it hands others to programs of the machine (EPS to Ghostscript), or reads a part of them."""
_log = logging.getLogger(__name__)


LabelledRow = tuple[str | bytes | tuple[str, str], str | float]
"""A text, two texts, or an image, as its file's path or its bytes; and the name of its label, or a number."""
_HOLDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number with a decimal point",
    str: "a text",
    bytes: "bytes",
}
_HOLDS |= {list: "a list", dict: "an object"}


class LabelledTokens(NamedTuple):
    """Tokens int64 and which of them are of the text [rows, length], the labels' numbers int64 [rows], or
    float32 where they are numbers."""

    tokens: Tensor
    mask: Tensor
    labels: Tensor


class PairTokens(NamedTuple):
    """The same of two texts in each row, with 0 or 1 for each token of the first or the second one: int64
    [rows, length]."""

    tokens: Tensor
    mask: Tensor
    segments: Tensor
    labels: Tensor


def check_labels(labels: Sequence[str], problem: ProblemType) -> tuple[str, ...]:
    """ConfigError for labels that are not two names at least, each once and not empty; for a regression one,
    of the number."""
    wrong = isinstance(labels, str) or not all(isinstance(each, str) for each in labels)
    if problem == "regression" and (wrong or len(labels) != 1):
        raise ConfigError(
            f"task: labels = {labels!r}; a regression names the one number that rows have as their label: "
            'labels = ["score"]',
            key=("task", "labels"),
        )
    if wrong or (len(labels) < 2 and problem != "regression"):
        raise ConfigError(
            f"task: labels = {labels!r}; name two at least, each as a text, in the order that all silos are "
            'to have: labels = ["no", "yes"]; or, where labels are numbers, problem_type = "regression"',
            key=("task", "labels"),
        )
    for place, each in enumerate(labels):
        if not each.strip() or each in labels[:place]:
            raise ConfigError(
                f"task: labels: {each!r} is empty, or there twice: each names one class",
                key=("task", "labels"),
            )
    return tuple(labels)


def read_labelled(
    path: Path,
    labels: Sequence[str],
    content: str | tuple[str, ...],
    label: str,
    inputs: Inputs = "text",
    problem: ProblemType = "single_label_classification",
) -> list[LabelledRow]:
    """The rows of a .jsonl or .parquet file, of its keys or columns `content`, two for pairs, and `label`.

    A whole number is the label of its digits, true and false are the labels of these names. An image is the
    path of a file, from the folder of this one, or its bytes, also under "bytes" as `datasets` of Hugging
    Face writes them. TaskError with file and line or row for one that lacks either, or whose label is none of
    the job's; the value itself is said in this machine's log alone.
    """
    names = (content,) if isinstance(content, str) else content
    found: list[LabelledRow] = []
    for place, value in objects_of(path):
        where = f"{path.name}, {place}"
        if not isinstance(value, dict):
            raise TaskError(f"{where}: an object is wanted")
        parts = [
            _content(where, value, name, key, path.parent, inputs)
            for name, key in zip(names, CONTENT[inputs], strict=True)
        ]
        own = _number(where, value, label) if problem == "regression" else _name(where, value, label, labels)
        found.append(((parts[0], parts[1]) if len(parts) == 2 else parts[0], own))  # type: ignore[arg-type]
    return found


def _content(
    where: str, row: Mapping[str, Any], name: str, key: str, folder: Path, inputs: Inputs
) -> str | bytes:
    value = row.get(name)
    found = _image_in(folder, value) if inputs == "images" else _text_in(value)
    if found is None:
        wanted = (
            "an image's file that is there, by its path from this one's folder"
            if inputs == "images"
            else "a text, not empty"
        )
        raise TaskError(f"{where}: {name!r} is wanted, {wanted}; {_held(where, row, name, key)}")
    return found


def _held(where: str, row: Mapping[str, Any], name: str, key: str) -> str:
    """What a row has there, by its kind alone: an error leaves the silo."""
    if name in row:
        return f"it holds {_HOLDS.get(type(row[name]), 'a ' + type(row[name]).__name__)}"
    _log.error("%s: its keys, but for empty ones, are %s", where, ", ".join(map(repr, sorted(row)))[:500])
    return (
        "it has none, or an empty one (this machine's log has its keys). Where it has another name at this "
        f'silo, say it beside the file: {key} = "..."'
    )


def _name(where: str, row: Mapping[str, Any], label: str, labels: Sequence[str]) -> str:
    value = row.get(label)
    if not isinstance(value, str | int):
        remedy = "; a row has one label here, not several" if isinstance(value, list) else ""
        if isinstance(value, float):
            remedy = ": pandas makes such of a column with gaps, and .astype('Int64') mends it"
        raise TaskError(
            f"{where}: {label!r} is wanted, a text, a whole number, or true or false; "
            f"{_held(where, row, label, 'label')}{remedy}"
        )
    name = str(value).lower() if isinstance(value, bool) else str(value)
    if name not in labels:
        # It may be what is in a wrong column: that stays here.
        _log.error("%s: the label %r is none of the job's", where, value)
        raise TaskError(
            f"{where}: its label is none of the job's, {', '.join(labels[:20])} (this machine's log has "
            "it): correct the data, or name it in labels of the job's [task] table"
        )
    return name


def _number(where: str, row: Mapping[str, Any], label: str) -> float:
    value = row.get(label)
    if isinstance(value, bool) or not isinstance(value, int | float) or not _fits(value):
        raise TaskError(
            f"{where}: {label!r} is wanted, a finite number that float32 holds; "
            f"{_held(where, row, label, 'label')}"
        )
    return float(value)


def _fits(value: float) -> bool:
    return abs(value) <= torch.finfo(torch.float32).max  # False for NaN.


def _text_in(value: Any) -> str | None:
    return value if isinstance(value, str) and value.strip() else None


def _image_in(folder: Path, value: Any) -> str | bytes | None:
    if isinstance(value, dict):
        value = value.get("bytes", value.get("path"))
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str) or not (folder / value).is_file():
        return None
    return str(folder / value)


def numbers_of(rows: Sequence[LabelledRow], labels: Sequence[str], problem: ProblemType) -> Tensor:
    """The places of the rows' labels among the job's: int64 [rows]; of a regression the numbers, float32.
    TaskError for a label that is none."""
    if problem == "regression":
        for number, (_, value) in enumerate(rows):
            if isinstance(value, bool) or not isinstance(value, int | float) or not _fits(value):
                raise TaskError(
                    f"rows, number {number}: its label is a {type(value).__name__}, and a finite number is "
                    "wanted: correct what rows(site) gives"
                )
        return torch.tensor([float(value) for _, value in rows], dtype=torch.float32)
    places: dict[Any, int] = {label: place for place, label in enumerate(labels)}
    for number, (_, label) in enumerate(rows):
        if label not in places:
            _log.error("rows, number %d: the label %r is none of the job's", number, label)
            raise TaskError(
                f"rows, number {number}: its label is none of the job's, {', '.join(labels[:20])} (this "
                "machine's log has it): correct what rows(site) gives"
            )
    return torch.tensor([places[label] for _, label in rows], dtype=torch.int64)


def labelled_tokens(
    tokenizer: Any, rows: Sequence[LabelledRow], numbers: Tensor, length: int, pairs: bool, segments: bool
) -> LabelledTokens | PairTokens:
    """Rows of `length` tokens, filled up at their ends; what is longer is cut as the tokenizer does, of
    `pairs` the longer text first, and said. `numbers` are the rows' labels; with `segments` it is told which
    tokens are of the second text."""
    filler, cut = int(tokenizer.pad_token_id), 0
    tokens = torch.full((len(rows), length), filler, dtype=torch.int64)
    mask, seconds = (torch.zeros(len(rows), length, dtype=torch.int64) for _ in range(2))
    for place, (content, _) in enumerate(rows):
        texts = content if isinstance(content, tuple) else (content,)
        if len(texts) != 1 + pairs or not all(isinstance(text, str) for text in texts):
            raise TaskError(f"rows, number {place}: {'two texts are' if pairs else 'a text is'} wanted")
        made = tokenizer(*texts)
        if len(made["input_ids"]) > length:
            cut += 1
            made = tokenizer(*texts, truncation=TRUNCATION, max_length=length)
        size = len(made["input_ids"])
        tokens[place, :size] = torch.tensor(made["input_ids"], dtype=torch.int64)
        mask[place, :size] = 1
        if segments:
            seconds[place, :size] = torch.tensor(made[SEGMENTS], dtype=torch.int64)
    if cut and pairs:
        _log.warning("%d pairs are longer than length = %d: their longer texts were cut", cut, length)
    elif cut:
        _log.warning("%d texts are longer than length = %d, and were cut there", cut, length)
    if segments:
        return PairTokens(tokens, mask, seconds, numbers)
    return LabelledTokens(tokens, mask, numbers)


class LabelledImages(TorchDataset[tuple[Tensor, Tensor]]):
    """Images as the base's processor makes them, read when they are asked for: float32 [channels, height,
    width], and the label's number, int64 []."""

    def __init__(self, processor: Any, rows: Sequence[LabelledRow], numbers: Tensor) -> None:
        self.processor = processor
        self.rows = rows
        self.labels = numbers

    def __len__(self) -> int:
        return len(self.rows)

    @override
    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        try:
            image = _opened(self.rows[place][0])  # type: ignore[arg-type]
        except ConfigError:
            raise
        except Exception as error:  # The library's own are of any class.
            # The name of a file may be a person's.
            _log.error("row %d of the site's share, %s: %s", place, str(self.rows[place][0])[:200], error)
            raise TaskError(
                f"row {place} of the site's share is no image that can be used (this machine's log has its "
                f"name and the reason); images are {', '.join(_FORMATS)}, one a file, of 8 bits a value, "
                "grey or coloured, and not transparent"
            ) from error
        return pixels_of(self.processor, image), self.labels[place]


def pixels_of(processor: Any, image: Any) -> Tensor:
    """float32 [channels, height, width] of an image of Pillow."""
    (made,) = processor(images=image, return_tensors="pt")["pixel_values"]
    return made  # type: ignore[no-any-return]


def _opened(content: str | bytes) -> Any:
    """An upright image of red, green and blue. ValueError for one that would lose something so."""
    pillow: Any = load("PIL.Image", "reading images")
    place = io.BytesIO(content) if isinstance(content, bytes) else content
    with pillow.open(place, formats=_FORMATS) as file:
        if (held := getattr(file, "n_frames", 1)) > 1:
            raise ValueError(f"it holds {held} images, and a row is one")
        image = load("PIL.ImageOps", "reading images").exif_transpose(file)
    if image.mode not in ("1", "L", "P", "RGB", "RGBA", "LA", "CMYK", "YCbCr"):
        raise ValueError(f"mode {image.mode}, of which 8 bits would not be the same")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    if image.mode in ("RGBA", "LA") and image.getchannel("A").getextrema() != (255, 255):
        raise ValueError("it is transparent in places, and what is behind it is not known")
    return image.convert("RGB")
