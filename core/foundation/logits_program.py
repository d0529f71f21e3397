"""A model as a program without Python: tensors in, logits out.

transformers' own models cannot be traced as they are: what they give is no tensor, and some make a cache.
Around one stands a module that gives the logits alone, without a cache.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from roundtable.core.errors import EncodingError
from roundtable.core.extras import load

Program = Literal["traced", "onnx"]
FILES: dict[Program, str] = {"traced": "model.pt2", "onnx": "model.onnx"}
_OF_TORCH = ("aten", "prims", "higher_order")
_TOLERANCE = 1e-4
"""Most by which logits of the program may be others, as a share of the largest."""


@dataclass(frozen=True)
class Traceable:
    """A module that gives logits; its inputs by name, as two examples of unlike shapes have them, and the
    names of their dimensions that may be of any size."""

    module: nn.Module
    example: Mapping[str, Tensor]
    other: Mapping[str, Tensor]
    free: Mapping[int, str]


class LogitsOf(nn.Module):
    """Inputs in the order of their names → logits, float32; with inputs that are `zeros` of the first one's
    shape, where what a model makes of their absence is written wrongly."""

    def __init__(
        self, model: nn.Module, names: tuple[str, ...], zeros: tuple[str, ...] = (), **how: object
    ) -> None:
        super().__init__()
        self.model = model
        self.names = names
        self.zeros = zeros
        self.how = how

    @override
    def forward(self, *inputs: Tensor) -> Tensor:
        given = dict(zip(self.names, inputs, strict=True))
        given |= {name: torch.zeros_like(inputs[0]) for name in self.zeros}
        logits: Tensor = self.model(**given, **self.how).logits
        return logits


def next_tokens(model: Any) -> Traceable:
    """`input_ids` int64 [rows, tokens] → logits [rows, tokens, vocabulary]; rows are filled up at their ends,
    which no earlier token sees."""
    chance = torch.Generator().manual_seed(0)
    example, other = (
        {"input_ids": torch.randint(model.config.vocab_size, shape, generator=chance)}
        for shape in ((2, 5), (3, 8))
    )
    module = LogitsOf(model, ("input_ids",), use_cache=False)
    return Traceable(module, example, other, {0: "rows", 1: "tokens"})


def check_onnx() -> None:
    """ConfigError where a library that writing ONNX takes is missing."""
    for name in ("onnx", "onnxscript"):
        load(name, "writing a model as ONNX")


def write_program(traceable: Traceable, kind: Program, folder: Path) -> None:
    """Writes the model as `torch.export` (model.pt2) or ONNX (model.onnx, and model.onnx.data) has it.

    What torch has written is compared with the model, on inputs of another shape. EncodingError for a model
    that cannot be traced, or gives other logits so. ONNX takes what `check_onnx` looks for.
    """
    module = traceable.module.eval()
    example, other = tuple(traceable.example.values()), tuple(traceable.other.values())
    sizes = tuple(dict.fromkeys(traceable.free, torch.export.Dim.DYNAMIC) for _ in example)
    with torch.no_grad(), _quietly():
        try:
            _take_plain_experts(module)
            program = torch.export.export(module, example, dynamic_shapes=(sizes,))
            _forget_places(program)
            _check_operations(program)
            made = program.module()(*other)
            if kind == "traced":
                torch.export.save(program, folder / FILES[kind])
            else:
                _write_onnx(program, traceable, folder / FILES[kind])
                made = _by_onnx(folder / FILES[kind], traceable.other)
        except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError) as error:
            raise EncodingError(f"torch cannot write this model as {kind}: {_said(error)}") from error
        wanted = module(*other)
    lost = float((made - wanted).abs().max() / wanted.abs().max())
    if not lost <= _TOLERANCE:
        raise EncodingError(
            f"as {kind} the model gives other logits: by {lost:.2g} of the largest. Export it as transformers"
        )


def _take_plain_experts(module: nn.Module) -> None:
    """Has a mixture of experts compute by torch's own operations, and not by one of transformers', which no
    other process has."""
    for part in module.modules():
        take = getattr(part, "set_experts_implementation", None)
        if callable(take):
            take("batched_mm")


def _check_operations(program: Any) -> None:
    """ValueError for an operation that a library brought along, without which nobody loads the program."""
    for module in program.graph_module.modules():
        for node in getattr(module, "graph", torch.fx.Graph()).nodes:
            own = getattr(node.target, "namespace", "aten")
            if own not in _OF_TORCH:
                raise ValueError(f"it computes {node.target}, an operation of {own} and not of torch itself")


def _said(error: BaseException) -> str:
    """The first line of what went wrong first: torch's exporters add reports for their own developers."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _forget_places(program: Any) -> None:
    """What torch writes beside each operation: in which files of this machine it was called."""
    for module in program.graph_module.modules():
        for node in getattr(module, "graph", torch.fx.Graph()).nodes:
            node.meta.pop("stack_trace", None)


def _write_onnx(program: Any, traceable: Traceable, path: Path) -> None:
    torch.onnx.export(
        program,
        tuple(traceable.example.values()),
        path,
        input_names=list(traceable.example),
        output_names=["logits"],
        dynamic_shapes=tuple(dict(traceable.free) for _ in traceable.example),
        verbose=False,
    )


def _by_onnx(path: Path, inputs: Mapping[str, Tensor]) -> Tensor:
    """The logits by ONNX's own evaluator, which is slow and needs no runtime."""
    evaluator: Any = load("onnx.reference", "checking a model in ONNX")
    operation: Any = load("onnx.reference.op_run", "checking a model in ONNX").OpRun

    class GatherElements(operation):  # type: ignore[misc]
        """As ONNX describes it: indices may be fewer along other axes, too, as DeBERTa's are, which the
        evaluator's own one does not take."""

        def _run(self, data: Any, indices: Any, axis: int | None = None) -> tuple[Any]:
            along = axis or 0
            places = torch.from_numpy(indices) % data.shape[along]
            return (torch.from_numpy(data).gather(along, places).numpy(),)

    run = evaluator.ReferenceEvaluator(str(path), new_ops=[GatherElements]).run
    (found,) = run(None, {name: value.numpy() for name, value in inputs.items()})
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
