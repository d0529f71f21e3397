"""A stand-in for a GPU: tensors that say they are on one, hold true values, and refuse what a GPU's would."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

GPU = torch.device("cuda")
GPUS = [
    "stand-in",
    pytest.param(
        "true",
        marks=(pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")),
    ),
]
"""For tests on both, by `a_gpu`."""
_HERE_ALONE = {"numpy", "data_ptr", "__array__", "untyped_storage", "storage"}
_DIVIDING = {"div", "true_divide", "__truediv__"}
_MOVING = {"copy_", "__setitem__"}


class Distant(Tensor):
    """A tensor of the stand-in."""


class PretendedGpu(TorchFunctionMode):
    """While it is entered, `.to("cuda")` gives tensors of the stand-in.

    As on a GPU: what is made of them is there too; a tensor of the CPU with a dimension does not go together
    with one of them, but to be copied; NumPy and kernels, which take addresses, do not reach them. And as
    torch does there, they are multiplied by the reciprocal where they would be divided by a plain number.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given, name = dict(kwargs or {}), getattr(func, "__name__", "")
        tensors = [each for each in _flat((*args, *given.values())) if isinstance(each, Tensor)]
        distant = any(isinstance(each, Distant) for each in tensors)
        if func == Tensor.device.__get__:  # type: ignore[attr-defined]
            return GPU if distant else _done(func, args, given)
        if name in ("to", "cpu", "cuda"):
            return _moved(func, name, args, given)
        if distant and name in _HERE_ALONE:
            raise TypeError(f"{name} of a tensor that is on a GPU: copy it to the host first")
        mixed = any(not isinstance(each, Distant) and each.dim() for each in tensors)
        if distant and mixed and name not in _MOVING:
            raise RuntimeError(f"{name} of tensors on the CPU and on a GPU")
        if distant and name in _DIVIDING and isinstance(args[1], int | float):
            func, args = torch.mul, (args[0], 1.0 / torch.tensor(args[1], dtype=args[0].dtype))
        if (wanted := given.get("device")) is not None and torch.device(wanted).type == "cuda":
            distant, given["device"] = True, "cpu"
        found = _done(func, args, given)
        return _marked(found) if distant else found


def _moved(func: Callable[..., Any], name: str, args: Sequence[Any], given: Mapping[str, Any]) -> Tensor:
    tensor, *rest = args
    there: torch.device | None = GPU if name == "cuda" else torch.device("cpu") if name == "cpu" else None
    kept = []
    for each in (*rest, given.get("device")):
        if isinstance(each, str | torch.device):
            there = torch.device(each)
        elif isinstance(each, Tensor):
            there = GPU if isinstance(each, Distant) else torch.device("cpu")
            kept.append(each.dtype)
        elif each is not None:
            kept.append(each)
    options = {key: value for key, value in given.items() if key != "device"}
    leaves = there is not None and (there.type == "cuda") != isinstance(tensor, Distant)
    plain = tensor.as_subclass(Tensor)
    if name == "to" and (kept or options):
        plain = _done(Tensor.to, (plain, *kept), options)
    plain = plain.clone() if leaves else plain
    stays = isinstance(tensor, Distant) if there is None else there.type == "cuda"
    return plain.as_subclass(Distant) if stays else plain


def _done(func: Callable[..., Any], args: Sequence[Any], given: Mapping[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **given)


def _marked(found: Any) -> Any:
    if isinstance(found, Tensor):
        return found if isinstance(found, Distant) else found.as_subclass(Distant)
    if isinstance(found, list | tuple):
        return type(found)([_marked(each) for each in found])
    return found


def _flat(values: Sequence[Any]) -> Iterator[Any]:
    for each in values:
        if isinstance(each, list | tuple):
            yield from _flat(each)
        else:
            yield each


def a_gpu(kind: str) -> AbstractContextManager[object]:
    """What to enter for the device "cuda" to be there: of GPUS."""
    return PretendedGpu() if kind == "stand-in" else nullcontext()
