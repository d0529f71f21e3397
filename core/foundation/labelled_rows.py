"""Rows with a label: read from files, checked, and brought to numbers that all silos understand alike."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset
from typing_extensions import override

from roundtable.core.errors import ConfigError, TaskError
from roundtable.core.extras import load
from roundtable.core.foundation.classifier_head import Inputs
from roundtable.core.foundation.text_files import objects_of

CONTENT = {"text": "text", "images": "image"}
"""What a row's content is called, where a silo does not say otherwise."""
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Of Pillow's: it hands others to programs of the machine (EPS to Ghostscript), or reads a part of them."""
_log = logging.getLogger(__name__)


LabelledRow = tuple[str | bytes, str]
"""A text, or an image, as its file's path or its bytes, and the name of its label."""


class LabelledTokens(NamedTuple):
    """Tokens int64 and which of them are of the text [rows, length], the labels' numbers int64 [rows]."""

    tokens: Tensor
    mask: Tensor
    labels: Tensor


def check_labels(labels: Sequence[str]) -> tuple[str, ...]:
    """ConfigError for labels that are not two names at least, each once and not empty."""
    if isinstance(labels, str) or len(labels) < 2 or not all(isinstance(each, str) for each in labels):
        raise ConfigError(
            f"task: labels = {labels!r}; name two at least, each as a text, in the order that all silos are "
            'to have: labels = ["no", "yes"]',
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
    path: Path, labels: Sequence[str], content: str, label: str, inputs: Inputs = "text"
) -> list[LabelledRow]:
    """The rows of a .jsonl or .parquet file, of its keys or columns `content` and `label`.

    A whole number is the label of its digits. An image is the path of a file, from the folder of this one, or
    its bytes, also under "bytes" as `datasets` of Hugging Face writes them. TaskError with file and line or
    row for one that lacks either, or whose label is none of the job's; the value itself is said in this
    machine's log alone.
    """
    find = _text_in if inputs == "text" else _image_in
    return list(_checked(path, labels, (content, label), find, CONTENT[inputs]))


def _checked(
    path: Path,
    labels: Sequence[str],
    names: tuple[str, str],
    find: Callable[[Path, Any], str | bytes | None],
    key: str,
) -> Iterator[LabelledRow]:
    content, label = names
    known = set(labels)
    for place, value in objects_of(path):
        where = f"{path.name}, {place}"
        if not isinstance(value, dict):
            raise TaskError(f"{where}: an object is wanted")
        found, named = find(path.parent, value.get(content)), value.get(label)
        if found is None:
            raise TaskError(
                f"{where}: {content!r} is wanted, and not empty, of an image a file that is there; where it "
                f'has another name at this silo, say it beside the file: {key} = "..."'
            )
        if isinstance(named, bool) or not isinstance(named, str | int):
            raise TaskError(
                f"{where}: {label!r} is wanted, a text or a whole number; where it has another name at this "
                'silo, say it beside the file: label = "..."'
            )
        if str(named) not in known:
            # It may be what is in a wrong column: that stays here.
            _log.error("%s: the label %r is none of the job's", where, named)
            raise TaskError(
                f"{where}: its label is none of the job's, {', '.join(labels[:20])} (this machine's log has "
                "it): correct the data, or name it in labels of the job's [task] table"
            )
        yield found, str(named)


def _text_in(folder: Path, value: Any) -> str | None:
    return value if isinstance(value, str) and value.strip() else None


def _image_in(folder: Path, value: Any) -> str | bytes | None:
    if isinstance(value, dict):
        value = value.get("bytes", value.get("path"))
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str) or not (folder / value).is_file():
        return None
    return str(folder / value)


def numbers_of(rows: Sequence[LabelledRow], labels: Sequence[str]) -> Tensor:
    """The places of the rows' labels among the job's: int64 [rows]. TaskError for a label that is none."""
    places = {label: place for place, label in enumerate(labels)}
    for number, (_, label) in enumerate(rows):
        if label not in places:
            _log.error("rows, number %d: the label %r is none of the job's", number, label)
            raise TaskError(
                f"rows, number {number}: its label is none of the job's, {', '.join(labels[:20])} (this "
                "machine's log has it): correct what rows(site) gives"
            )
    return torch.tensor([places[label] for _, label in rows], dtype=torch.int64)


def labelled_tokens(
    tokenizer: Any, rows: Sequence[LabelledRow], labels: Sequence[str], length: int
) -> LabelledTokens:
    """Rows of `length` tokens, filled up at their ends; what is longer is cut there as the tokenizer does,
    and said."""
    filler = int(tokenizer.pad_token_id)
    tokens = torch.full((len(rows), length), filler, dtype=torch.int64)
    mask = torch.zeros(len(rows), length, dtype=torch.int64)
    cut = 0
    for place, (text, _) in enumerate(rows):
        if not isinstance(text, str):
            raise TaskError(f"rows, number {place}: a text is wanted")
        ids = tokenizer(text)["input_ids"]
        if len(ids) > length:
            cut += 1
            ids = tokenizer(text, truncation=True, max_length=length)["input_ids"]
        tokens[place, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
        mask[place, : len(ids)] = 1
    if cut:
        _log.warning("%d texts are longer than length = %d, and were cut there", cut, length)
    return LabelledTokens(tokens, mask, numbers_of(rows, labels))


class LabelledImages(TorchDataset[tuple[Tensor, Tensor]]):
    """Images as the base's processor makes them, read when they are asked for: float32 [channels, height,
    width], and the label's number, int64 []."""

    def __init__(self, processor: Any, rows: Sequence[LabelledRow], labels: Sequence[str]) -> None:
        self.processor = processor
        self.rows = rows
        self.labels = numbers_of(rows, labels)

    def __len__(self) -> int:
        return len(self.rows)

    @override
    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        try:
            image = _opened(self.rows[place][0])
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
