"""A model as a program without Python: tokens in, logits out.

transformers' own models cannot be traced as they are: what they give is no tensor, and they make a cache.
Around one stands a module that gives the logits alone, without a cache.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from roundtable.core.errors import EncodingError
from roundtable.core.extras import load

Program = Literal["traced", "onnx"]
FILES: dict[Program, str] = {"traced": "model.pt2", "onnx": "model.onnx"}
_TOLERANCE = 1e-4
"""Most by which logits of the program may be others, as a share of the largest."""


class LogitsOf(nn.Module):
    """`input_ids` int64 [rows, tokens] → logits float32 [rows, tokens, vocabulary]; rows are filled up at
    their ends, which no earlier token sees."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @override
    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=input_ids, use_cache=False).logits
        return logits


def check_onnx() -> None:
    """ConfigError where a library that writing ONNX takes is missing."""
    for name in ("onnx", "onnxscript"):
        load(name, "writing a model as ONNX")


def write_program(model: nn.Module, kind: Program, folder: Path, vocabulary: int) -> None:
    """Writes the model as `torch.export` (model.pt2) or ONNX (model.onnx, and model.onnx.data) has it, for
    any number of rows and tokens.

    What torch has written is compared with the model, on rows of another shape. EncodingError for a model
    that cannot be traced, or gives other logits so. ONNX takes what `check_onnx` looks for.
    """
    module = LogitsOf(model).eval()
    chance = torch.Generator().manual_seed(0)
    example, other = (torch.randint(vocabulary, shape, generator=chance) for shape in ((2, 5), (3, 8)))
    any_size = torch.export.Dim.DYNAMIC
    with torch.no_grad(), _quietly():
        try:
            program = torch.export.export(module, (example,), dynamic_shapes=({0: any_size, 1: any_size},))
            _forget_places(program)
            made = program.module()(other)
            if kind == "traced":
                torch.export.save(program, folder / FILES[kind])
            else:
                _write_onnx(program, example, folder / FILES[kind])
                made = _by_onnx(folder / FILES[kind], other)
        except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError) as error:
            raise EncodingError(f"torch cannot write this model as {kind}: {error}") from error
        wanted = module(other)
    lost = float((made - wanted).abs().max() / wanted.abs().max())
    if not lost <= _TOLERANCE:
        raise EncodingError(
            f"as {kind} the model gives other logits: by {lost:.2g} of the largest. Export it as transformers"
        )


def _forget_places(program: Any) -> None:
    """What torch writes beside each operation: in which files of this machine it was called."""
    for module in program.graph_module.modules():
        for node in getattr(module, "graph", torch.fx.Graph()).nodes:
            node.meta.pop("stack_trace", None)


def _write_onnx(program: Any, example: Tensor, path: Path) -> None:
    torch.onnx.export(
        program,
        (example,),
        path,
        input_names=["input_ids"],
        output_names=["logits"],
        dynamic_shapes=({0: "rows", 1: "tokens"},),
        verbose=False,
    )


def _by_onnx(path: Path, tokens: Tensor) -> Tensor:
    """The logits by ONNX's own evaluator, which is slow and needs no runtime."""
    evaluator = load("onnx.reference", "checking a model in ONNX").ReferenceEvaluator(str(path))
    (found,) = evaluator.run(None, {"input_ids": tokens.numpy()})
    return torch.from_numpy(found)


@contextmanager
def _quietly() -> Iterator[None]:
    """Without what torch says of libraries that nothing here uses."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
