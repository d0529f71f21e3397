"""A model's forward pass for any number of examples, as one recorded program over a fixed number of rows.

Examples of many clients lie side by side in it. That is each client's own pass only where no example has a
part in another's outputs, which the recorded operations show, and where the kernels give a row the same bits
wherever it lies: then it does not matter who shares a pass with whom, or in which process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from roundtable.core.algorithms.step import LocalStep
from roundtable.simulation.backends.vectorised.buffer_plan import Aliased
from roundtable.simulation.backends.vectorised.compiled_step import CompiledProgram
from roundtable.simulation.backends.vectorised.instructions import Unsuitable
from roundtable.simulation.backends.vectorised.library import Library
from roundtable.simulation.backends.vectorised.program import Vectors
from roundtable.simulation.backends.vectorised.recording import Call, Recording, Ref, Unrecordable, record

ROWS = 32
_TOLERANCE = 1e-4
aten = torch.ops.aten


class RowForward:
    """`module` on rows of `examples` [n, ...] and of all that are like them, in evaluation mode.

    It reads the module's tensors where they lie, so that whatever is put there counts. Raises Unrecordable
    where the kernels do not do all of it, or a row's outputs [...] do not follow from that row alone.
    """

    def __init__(self, library: Library, module: nn.Module, examples: Sequence[Tensor]) -> None:
        self._kinds = [(part.shape[1:], part.dtype) for part in examples]
        rows = torch.arange(ROWS) % len(examples[0])
        inputs = [part.index_select(0, rows) for part in examples]
        recording = _recorded(module, inputs)
        check_rows(recording)
        try:
            program = CompiledProgram(library, recording, (), Vectors.zeros(0, inputs[0].device), LocalStep())
        except (Aliased, Unsuitable) as error:
            raise Unrecordable(f"the kernels cannot do it ({error})") from error
        if not program.alone:
            raise Unrecordable("torch has a part in it")
        self._run: Callable[..., Tensor] = program.run
        self._check(module, inputs)

    def takes(self, inputs: Sequence[Tensor]) -> bool:
        """Whether inputs are like the examples that the program was made for."""
        return [(part.shape[1:], part.dtype) for part in inputs] == self._kinds

    def __call__(self, inputs: Sequence[Tensor]) -> Tensor:
        """The outputs [n, ...] of n rows; each input is [n, ...]. IndexError for an index out of range."""
        count = len(inputs[0])
        missing = -count % ROWS
        if missing:
            inputs = [torch.cat([part, part[:1].expand(missing, *part.shape[1:])]) for part in inputs]
        blocks = zip(*(torch.split(part, ROWS) for part in inputs), strict=True)
        return torch.cat([self._run(0.0, *block) for block in blocks])[:count]

    def _check(self, module: nn.Module, inputs: Sequence[Tensor]) -> None:
        found, expected = self(inputs), module(*inputs)
        if not torch.allclose(found, expected, _TOLERANCE, _TOLERANCE * float(expected.abs().max())):
            raise Unrecordable("it does not give what the module gives")
        moved = self([part.roll(5, 0) for part in inputs])
        if not torch.equal(moved.roll(-5, 0), found):
            raise Unrecordable("a row's outputs depend on where it lies")


def _recorded(module: nn.Module, inputs: Sequence[Tensor]) -> Recording:
    """Twice, on other rows the second time; they must be the same."""
    recordings = []
    for values in (inputs, [part.flip(0) for part in inputs]):

        def outputs(*given: Tensor) -> list[Tensor]:
            found = module(*given)
            if not isinstance(found, Tensor) or found.dtype != torch.float32:
                raise Unrecordable("it gives more than one tensor, or another kind")
            return [found]

        recordings.append(record(outputs, values))
    difference = recordings[0].same_as(recordings[1])
    if difference is not None:
        raise Unrecordable(difference)
    if recordings[0].random:
        raise Unrecordable("it draws random numbers")
    return recordings[0]


def check_rows(recording: Recording) -> None:
    """Raises Unrecordable unless output i of the recorded pass [ROWS, ...] follows from row i of its inputs.

    Of each value that the inputs reach, in the order in which one counts through it, the first part of ROWS
    equal ones follows from row 0, and so on: each operation has to keep that.
    """
    kinds = recording.kinds
    reached = set(recording.inputs)
    if any(not kinds[ref].shape or kinds[ref].shape[0] != ROWS for ref in reached):
        raise Unrecordable("an input has no rows")
    for call in recording.calls:
        reads = [ref for ref in call.reads if ref in reached]
        if not reads:
            if call.writes:
                raise Unrecordable(f"{call.operator} writes to what no row is in")
            continue
        keeps = torch.Tag.pointwise in call.operator.tags and _pointwise(call, reached, recording)
        if not keeps and not _RULES.get(call.operator, _never)(call, reached, recording):
            raise Unrecordable(f"{call.operator} may mix rows")
        made = {ref for ref in call.outputs if ref is not None}
        if any(not kinds[ref].shape or kinds[ref].shape[0] % ROWS for ref in made):
            raise Unrecordable(f"{call.operator} gives something that has no rows")
        reached |= made
    (result,) = recording.results
    if result not in reached or kinds[result].shape[0] != ROWS:
        raise Unrecordable("its output has no rows")


_Rule = Callable[[Call, set[Ref], Recording], bool]


def _never(call: Call, reached: set[Ref], recording: Recording) -> bool:
    return False


def _always(call: Call, reached: set[Ref], recording: Recording) -> bool:
    return True


def _pointwise(call: Call, reached: set[Ref], recording: Recording) -> bool:
    """Each row's values stay in their place, and what is broadcast to them is the same for all rows."""
    kinds = recording.kinds
    (out,) = call.outputs
    if out is None:
        return False
    shape = kinds[out].shape
    for ref in call.reads:
        own = kinds[ref].shape
        fits = own[:1] == shape[:1] and len(own) == len(shape)
        common = len(own) < len(shape) or own[0] == 1
        if not (fits if ref in reached else common):
            return False
    return not call.writes or call.arguments[0] == out


def _first_alone(call: Call, reached: set[Ref], recording: Recording) -> bool:
    """Rows are in the first argument only."""
    return [ref for ref in call.reads if ref in reached] == [call.arguments[0]]


def _product_and_bias(call: Call, reached: set[Ref], recording: Recording) -> bool:
    bias, left, _ = call.arguments
    shape = recording.kinds[bias].shape
    rows = [ref for ref in call.reads if ref in reached]
    return rows == [left] and (len(shape) < 2 or shape[0] == 1)


def _products(call: Call, reached: set[Ref], recording: Recording) -> bool:
    return all(ref in reached for ref in call.reads)


def _second_alone(call: Call, reached: set[Ref], recording: Recording) -> bool:
    return [ref for ref in call.reads if ref in reached] == [call.arguments[1]]


def _swap(call: Call, reached: set[Ref], recording: Recording) -> bool:
    rank = len(recording.kinds[call.reads[0]].shape)
    return all(dim % rank for dim in call.arguments[1:3])


def _order(call: Call, reached: set[Ref], recording: Recording) -> bool:
    dims = call.arguments[1]
    return bool(dims) and dims[0] % len(dims) == 0


def _inner(call: Call, reached: set[Ref], recording: Recording) -> bool:
    """A dimension, or some, that is not the rows'."""
    rank = len(recording.kinds[call.reads[0]].shape)
    dims = call.arguments[1] if len(call.arguments) > 1 else None
    listed = [dims] if isinstance(dims, int) else list(dims or ())
    return bool(listed) and all(dim % rank for dim in listed)


def _layer_norm(call: Call, reached: set[Ref], recording: Recording) -> bool:
    source, shape = call.arguments[:2]
    return _first_alone(call, reached, recording) and len(shape) < len(recording.kinds[source].shape)


_RULES: dict[object, _Rule] = {
    **dict.fromkeys([aten.view.default, aten._unsafe_view.default, aten.clone.default], _always),
    **dict.fromkeys([aten.unsqueeze.default, aten.squeeze.dim, aten.detach.default], _always),
    **dict.fromkeys([aten.mm.default, aten.native_group_norm.default], _first_alone),
    **dict.fromkeys([aten.max_pool2d_with_indices.default, aten.avg_pool2d.default], _first_alone),
    aten.convolution.default: _first_alone,
    **dict.fromkeys([aten._softmax.default, aten._log_softmax.default], _inner),
    **dict.fromkeys([aten.sum.dim_IntList, aten.mean.dim], _inner),
    aten.addmm.default: _product_and_bias,
    aten.bmm.default: _products,
    aten.embedding.default: _second_alone,
    aten.transpose.int: _swap,
    aten.permute.default: _order,
    aten.native_layer_norm.default: _layer_norm,
}
