"""An optimizer's state that is kept in 8 bits from one step to the next.

Dettmers et al. 2022 have kernels that decode, step and code at once. Here torch's own optimizer takes the
step, on the decoded state of a portion of the parameters. A checkpoint holds the state as without this, in
float32: coding it again gives the same codes, where blocks are the same, and else rounds as a step does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from roundtable.cluster.parallel.strategy import CODED_FROM, CODED_PORTION, CODED_STATE
from roundtable.cluster.stepping.eight_bits import BLOCK, Levels, decode, encode
from roundtable.cluster.stepping.portions import step_by_portions


class CodedTensor:
    """The place of one tensor of state among the codes of its portion."""

    def __init__(self, codes: Codes, first: int, shape: torch.Size) -> None:
        self.codes = codes
        self.first = first
        self.shape = shape

    def read(self) -> Tensor:
        """The tensor, decoded, in the host's memory."""
        within = slice(self.first, self.first + _padded(self.shape.numel()))
        scales = self.codes.scales[within.start // BLOCK : within.stop // BLOCK]
        flat = decode(self.codes.codes[within], scales, self.codes.table)
        return flat[: self.shape.numel()].view(self.shape).cpu()


@dataclass(frozen=True)
class Codes:
    """State of one kind of a portion's parameters: uint8 [n · BLOCK], a scale for each block, the levels."""

    codes: Tensor
    scales: Tensor
    table: Levels


# (the name of a kind of state, type, device), of a portion's parameters: decoded, and each with its part.
_Kind = tuple[str, torch.dtype, torch.device]


@dataclass(frozen=True)
class _Decoded:
    codes: Codes
    flat: Tensor
    parts: dict[Tensor, tuple[CodedTensor, Tensor]]


def code_state(optimizer: torch.optim.Optimizer) -> None:
    """Has the optimizer's state coded after each step, and decoded for the next one.

    Coded is what `CODED_STATE` names, of CODED_FROM values or more; the rest stays as it is. The optimizer is
    one that `cannot_code_state` has no reason against.
    """
    coder = _Coder(optimizer)
    step_by_portions(optimizer, CODED_PORTION, coder.bring, coder.put_back)


def read_state(value: Any) -> Any:
    """What an optimizer's state holds under a name, decoded where it is coded."""
    return value.read() if isinstance(value, CodedTensor) else value


def open_state(optimizer: torch.optim.Optimizer) -> None:
    """Puts plain tensors in the host's memory in the place of codes, which the next step codes."""
    for values in optimizer.state.values():
        for key, value in values.items():
            values[key] = read_state(value)


class _Coder:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._tables: dict[_Kind, Levels] = {}

    def bring(self, portion: Sequence[Tensor]) -> list[_Decoded]:
        """Decodes the state of these parameters."""
        coded: dict[int, tuple[Codes, dict[Tensor, tuple[str, CodedTensor]]]] = {}
        for parameter, key, value in self._state(portion):
            if isinstance(value, CodedTensor):
                coded.setdefault(id(value.codes), (value.codes, {}))[1][parameter] = key, value
            elif isinstance(value, Tensor) and key in CODED_STATE:
                # Loaded in the host's memory.
                self._optimizer.state[parameter][key] = value.to(parameter.device)
        found = []
        for codes, held in coded.values():
            flat = decode(codes.codes, codes.scales, codes.table)
            parts = {}
            for parameter, (key, each) in held.items():
                view = flat[each.first : each.first + each.shape.numel()].view(each.shape)
                self._optimizer.state[parameter][key] = view
                parts[parameter] = each, view
            found.append(_Decoded(codes, flat, parts))
        return found

    def put_back(self, portion: Sequence[Tensor], brought: Sequence[_Decoded]) -> None:
        """Codes the state of these parameters, over the codes that it was decoded from where all has one."""
        places = {id(view): each for each in brought for _, view in each.parts.values()}
        kinds: dict[_Kind, dict[Tensor, Tensor]] = {}
        for parameter, key, value in self._state(portion):
            if isinstance(value, Tensor) and key in CODED_STATE and value.numel() >= CODED_FROM:
                kinds.setdefault((key, value.dtype, value.device), {})[parameter] = value
        for kind, values in kinds.items():
            before = {id(places.get(id(value))): places.get(id(value)) for value in values.values()}
            decoded = next(iter(before.values()))
            if len(before) == 1 and decoded is not None and len(decoded.parts) == len(values):
                encode(decoded.flat, decoded.codes.codes, decoded.codes.scales, decoded.codes.table)
                held = {parameter: each for parameter, (each, _) in decoded.parts.items()}
            else:
                held = self._coded(kind, values)
            for parameter, each in held.items():
                self._optimizer.state[parameter][kind[0]] = each

    def _coded(self, kind: _Kind, values: dict[Tensor, Tensor]) -> dict[Tensor, CodedTensor]:
        """Codes in new memory: each tensor begins a block."""
        key, dtype, device = kind
        if kind not in self._tables:
            like = next(iter(values.values()))
            self._tables[kind] = Levels(like, signed=CODED_STATE[key])
        size = sum(_padded(value.numel()) for value in values.values())
        flat = torch.zeros(size, dtype=dtype, device=device)
        codes = Codes(
            torch.empty(size, dtype=torch.uint8, device=device),
            torch.empty(size // BLOCK, dtype=dtype, device=device),
            self._tables[kind],
        )
        held, first = {}, 0
        for parameter, value in values.items():
            flat[first : first + value.numel()] = value.reshape(-1)
            held[parameter] = CodedTensor(codes, first, value.shape)
            first += _padded(value.numel())
        encode(flat, codes.codes, codes.scales, codes.table)
        return held

    def _state(self, portion: Sequence[Tensor]) -> Iterator[tuple[Tensor, str, Any]]:
        for parameter in portion:
            for key, value in list(self._optimizer.state.get(parameter, {}).items()):
                yield parameter, key, value


def _padded(count: int) -> int:
    return -(-count // BLOCK) * BLOCK
