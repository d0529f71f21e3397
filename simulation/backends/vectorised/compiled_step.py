"""A recorded step whose operations run in compiled kernels where those have them, and in torch for the rest.

Operations that the kernels have, one after the other, become one call into the library. They work in one
block of memory, and on the weights where they lie; what a product adds to the weights goes there without
being stored before.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from roundtable.core.algorithms.step import LocalStep
from roundtable.simulation.backends.vectorised.buffer_plan import is_window, lifetimes, packed, roots
from roundtable.simulation.backends.vectorised.instructions import SCRATCH, Instruction, Number, Place
from roundtable.simulation.backends.vectorised.library import Library
from roundtable.simulation.backends.vectorised.lowering import lower
from roundtable.simulation.backends.vectorised.lowering_images import without_indices
from roundtable.simulation.backends.vectorised.program import StepProgram, Vectors, needed
from roundtable.simulation.backends.vectorised.recording import Call, Recording, Ref
from roundtable.simulation.backends.vectorised.updating import SQUARES, TARGET, VELOCITY, WHOLE, Updates

_BLOCK, _WEIGHTS = 0, 1
_BESIDE = {TARGET: 2, VELOCITY: 3, WHOLE: 4, SQUARES: 5, SCRATCH: 6}
"""Rows of the table of addresses; those of values that torch or the batch brings follow."""


@dataclass(frozen=True)
class _Step:
    """A call and what the kernels do for it: None where torch does it, nothing where it is a mere window."""

    call: Call
    instructions: Sequence[Instruction] | None


@dataclass(frozen=True)
class _Chunk:
    """Instructions that run one after the other, and the local names of what they look at."""

    code: list[int]
    looks_at: str


class CompiledProgram(StepProgram):
    """The same step as its base class, faster; `compiled` is the share of its operations that the kernels do.

    Raises Aliased or Unsuitable for a step that it cannot take apart.
    """

    def __init__(
        self,
        library: Library,
        recording: Recording,
        parameters: Sequence[Tensor],
        vectors: Vectors,
        step: LocalStep,
    ) -> None:
        self._library = library
        self._kinds = recording.kinds
        self._root = roots(recording)
        self._starts = {
            ref: int(parameter.storage_offset() - vectors.weights.storage_offset())
            for ref, parameter in zip(recording.inputs, parameters, strict=False)
        }
        self._numbers: list[float | str] = ["rate", "-rate", "kept"]
        self._rows: dict[Ref, int] = {}
        self._places: dict[Ref, int] = {}
        self._gathered_to: list[Tensor] = []
        super().__init__(recording, parameters, vectors, step)

    @override
    def _write(self) -> str:
        calls = [call for call in self._recording.calls if not self._hoisted(call)]
        calls = needed(calls, [ref for ref in self._recording.results if ref])
        calls = without_indices(calls, self._recording.results, lambda call: lower(call, self._kinds))
        inputs = self._recording.inputs[: len(self._parameters)]
        updates = Updates(calls, self._kinds, inputs, self._gradients, self._starts, self.rule)
        steps = [self._prepared(call) for call in calls if updates.gone.isdisjoint(call.outputs)]
        owners = self._made(steps)
        self._gathered = updates.redirect(owners)
        final = updates.instructions()
        self._by_torch = [(inputs.index(ref), *made) for ref, made in updates.by_torch.items()]
        self._allocate(steps, owners - set(self._gathered), final)
        real = [step for step in steps if step.instructions != ()]
        self.compiled = sum(step.instructions is not None for step in real) / max(1, len(real))
        return self._function(steps, final)

    def _prepared(self, call: Call) -> _Step:
        return _Step(call, () if is_window(call, self._root) else lower(call, self._kinds))

    def _made(self, steps: Sequence[_Step]) -> set[Ref]:
        """The values that the kernels make."""
        known, made = {*self._fixed, *self._batch}, set()
        for step in steps:
            fresh = {ref for ref in step.call.outputs if ref and self._root[ref] == ref} - known
            known |= fresh
            made |= fresh if step.instructions else set()
        return made

    def _allocate(self, steps: Sequence[_Step], owners: set[Ref], final: Sequence[Instruction]) -> None:
        ends = [ref for instruction in final for ref in instruction.refs if ref in self._root]
        ends += [ref for _, made, _ in self._by_torch for ref in made.reads]
        spans = lifetimes([step.call for step in steps], [*ends, *filter(None, [self._loss])], self._root)
        self._places, length = packed(sorted(owners, key=lambda ref: ref.number), spans, self._kinds)
        self._block = torch.zeros(max(1, length))
        self._whole = torch.zeros(0 if self.rule.plain else self._globals["weights"].numel())
        self._squares = torch.zeros(1)
        working = [part.working for step in steps for part in step.instructions or ()]
        self._scratch = torch.empty(max(working, default=0))

    def _function(self, steps: Sequence[_Step], final: Sequence[Instruction]) -> str:
        """The text: addresses of what each step brings, then calls of the kernels and of torch in turn."""
        segments: list[_Step | _Chunk] = []
        waiting: list[Instruction] = []
        wanted = self._wanted(steps)
        for step in steps:
            if step.instructions:
                waiting += step.instructions
            elif step.instructions is None:
                segments += [self._encoded(waiting), step]
                waiting = []
            elif not wanted.isdisjoint(step.call.outputs):
                segments.append(step)
        segments.append(self._encoded([*waiting, *final]))
        run = iter(self._runners([segment.code for segment in segments if isinstance(segment, _Chunk)]))
        lines = ["set_rate(rate)", *(line for ref in self._batch for line in self._addressed(ref))]
        for segment in segments:
            if isinstance(segment, _Step):
                lines.append(self._line(segment.call))
                lines += [line for ref in segment.call.outputs if ref for line in self._addressed(ref)]
            else:
                # The comment keeps what the kernels look at from being deleted before.
                runner = self._bind(next(run))
                lines += [f"{runner}() or refuse()  # {segment.looks_at}"] if segment.code else []
        chunks = [segment for segment in segments if isinstance(segment, _Chunk) and segment.code]
        still = self._loss is not None and self._still(self._loss)
        self.alone = still and len(chunks) == len(segments) == 1 and not self._by_torch
        lines += [self._product_line(*product) for product in self._by_torch]
        self._globals |= {"refuse": _refuse, "set_rate": self._set_rate}
        name = self._name(self._loss)
        return self._text_of_function(lines, f"{name}.clone()" if self._loss in self._fixed else name, {name})

    def repeat(self, rate: float, examples: Sequence[Tensor], order: Tensor) -> Tensor:
        """The step on a batch of these examples for each row of `order`, int64; their losses.

        Only where torch has no part in the step (`alone`) and examples are `whole`.
        """
        assert self._loss is not None
        self._set_rate(rate)
        rows, numbers = self._globals["rows"], self._globals["numbers"]
        places = [place for place, ref in enumerate(self._batch) if ref in self._rows]
        read = [examples[place] for place in places]
        count, size = order.shape
        if not self._gathered_to:
            # A program is for batches of one size.
            self._gathered_to = [torch.empty(size, *part.shape[1:], dtype=part.dtype) for part in read]
        which_rows = [self._rows[self._batch[place]] for place in places]
        for row, tensor in zip(which_rows, self._gathered_to, strict=True):
            rows[row] = tensor.data_ptr()
        losses = torch.empty(count)
        end = ctypes.c_void_p(ctypes.addressof(self._code) + ctypes.sizeof(self._code))
        code = (ctypes.byref(self._code), end, rows, numbers)
        which = (ctypes.c_int64(count), ctypes.c_int64(size), ctypes.c_void_p(order.data_ptr()))
        inputs = (
            ctypes.c_int64(len(read)),
            _integers(which_rows),
            _integers([part.data_ptr() for part in read]),
            _integers([part.stride(0) * part.element_size() for part in read]),
            _integers([batch.nbytes // size for batch in self._gathered_to]),
        )
        told = (ctypes.c_void_p(self._fixed[self._loss].data_ptr()), ctypes.c_void_p(losses.data_ptr()))
        if not self._library.repeat(*code, *which, *inputs, *told):
            _refuse()
        return losses

    def _wanted(self, steps: Sequence[_Step]) -> set[Ref]:
        """Windows that torch looks through, and no more."""
        wanted = {ref for _, made, _ in self._by_torch for ref in made.reads}
        wanted |= {self._loss} if self._loss else set()
        for step in reversed(steps):
            if step.instructions is None or (
                step.instructions == () and not wanted.isdisjoint(step.call.outputs)
            ):
                wanted.update(step.call.reads)
        return {ref for ref in wanted if not self._still(ref)}

    def _still(self, ref: Ref) -> bool:
        """Whether a value lies in the same place in each step."""
        root = self._root[ref]
        return root in self._places or root in self._gathered or root in self._fixed

    @override
    def _name(self, ref: Ref | None) -> str:
        assert ref is not None
        if ref not in self._fixed and self._still(ref):
            kind, root = self._kinds[ref], self._root[ref]
            start = kind.offset - self._kinds[root].offset
            if root in self._fixed:
                base, start = self._fixed[root], start + int(self._fixed[root].storage_offset())
            elif root in self._gathered:
                base, start = self._whole, start + self._gathered[root]
            else:
                base, start = self._block, start + self._places[root]
            self._fixed[ref] = torch.as_strided(base, kind.shape, kind.stride, start)
        return super()._name(ref)

    def _addressed(self, ref: Ref) -> list[str]:
        if ref not in self._rows or ref in self._fixed:
            return []
        return [f"rows[{self._rows[ref]}] = v{ref.number}.data_ptr()"]

    def _set_rate(self, rate: float) -> None:
        """The numbers that follow from the rate."""
        numbers = self._globals["numbers"]
        numbers[0], numbers[1] = rate, -rate
        numbers[2] = 1.0 - rate * (self.rule.weight_decay + self.rule.pull)

    def _encoded(self, instructions: Sequence[Instruction]) -> _Chunk:
        """Instructions as the integers that kernels.cpp reads."""
        code: list[int] = []
        for instruction in instructions:
            operation, _, function = instruction.operation.partition(" ")
            words = [self._library.maps[function]] if function else []
            for operand in instruction.operands:
                if isinstance(operand, Place):
                    words += self._address(operand)
                elif isinstance(operand, Number):
                    words.append(self._number(operand.value))
                else:
                    words.append(operand)
            code += [self._library.operations[operation], len(words) + 2, *words]
        roots = {self._root[ref] for i in instructions for ref in i.refs if ref in self._root}
        names = [f"v{ref.number}" for ref in roots if ref in self._rows and ref not in self._fixed]
        return _Chunk(code, " ".join(names))

    def _number(self, value: float | str) -> int:
        if value not in self._numbers:
            self._numbers.append(value)
        return self._numbers.index(value)

    def _address(self, place: Place) -> tuple[int, int]:
        """Row and offset of a place."""
        if place.ref is None:
            return -1, 0
        if place.ref in _BESIDE:
            return _BESIDE[place.ref], place.offset
        root = self._root[place.ref]
        offset = place.offset + self._kinds[place.ref].offset - self._kinds[root].offset
        if root in self._starts:
            return _WEIGHTS, self._starts[root] + offset
        if root in self._gathered:
            return _BESIDE[WHOLE], self._gathered[root] + offset
        if root in self._places:
            return _BLOCK, self._places[root] + offset
        return self._rows.setdefault(root, len(_BESIDE) + 2 + len(self._rows)), offset

    def _runners(self, chunks: Sequence[list[int]]) -> list[Any]:
        """A function without arguments for each chunk of code; the tables must not grow after this."""
        self._code = (ctypes.c_int64 * sum(map(len, chunks)))(*(word for chunk in chunks for word in chunk))
        own = [self._block, self._globals["weights"], self._globals["target"], self._globals["velocity"]]
        addresses = [tensor.data_ptr() for tensor in (*own, self._whole, self._squares, self._scratch)]
        addresses += [self._fixed[ref].data_ptr() if ref in self._fixed else 0 for ref in self._rows]
        rows = (ctypes.c_int64 * len(addresses))(*addresses)
        values = [0.0 if isinstance(value, str) else value for value in self._numbers]
        numbers = (ctypes.c_double * len(values))(*values)
        self._globals |= {"rows": rows, "numbers": numbers}
        starts = [sum(map(len, chunks[:number])) for number in range(len(chunks) + 1)]
        ends = [ctypes.c_void_p(ctypes.addressof(self._code) + 8 * start) for start in starts]
        return [partial(self._library.run, first, last, rows, numbers) for first, last in pairwise(ends)]


def whole(examples: Tensor) -> bool:
    """Whether each example lies in one piece in the memory of the processor."""
    if examples.device.type != "cpu" or not examples.shape[0]:
        return False
    return examples.is_contiguous() or examples[0].is_contiguous()


def _integers(values: Sequence[int]) -> Any:
    return (ctypes.c_int64 * len(values))(*values)


def _refuse() -> None:
    raise IndexError("a label or an index of the batch is out of range")
