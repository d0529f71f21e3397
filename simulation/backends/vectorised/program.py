"""Turns a recorded training step into one straight Python function over a flat vector of weights.

The function is the same operations in the same order, less what a fixed model makes needless:
autograd's bookkeeping, views of the weights (they lie where they lie, so they are made once), and
gradients of weight matrices, which a matrix product adds to the weights as it is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from roundtable.core.algorithms.step import LocalStep
from roundtable.simulation.backends.vectorised.recording import Call, Operator, Recording, Ref, refill

aten = torch.ops.aten

# The same operations by torch's own bindings, which parse their arguments several times faster.
_FAST: Mapping[Operator, Any] = {
    aten.mm.default: torch.mm,
    aten.bmm.default: torch.bmm,
    aten.addmm.default: torch.addmm,
    aten.relu.default: torch.relu,
    aten.tanh.default: torch.tanh,
    aten.sigmoid.default: torch.sigmoid,
    aten.t.default: torch.t,
    aten.mul.Tensor: torch.mul,
    aten.add.Tensor: torch.add,
    aten.sub.Tensor: torch.sub,
    aten.div.Tensor: torch.div,
    aten.sum.dim_IntList: torch.sum,
    aten.view.default: Tensor.view,
    aten.transpose.int: torch.transpose,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.expand.default: Tensor.expand,
    aten._log_softmax.default: torch._log_softmax,
    aten._softmax.default: torch._softmax,
    aten.native_layer_norm.default: torch.native_layer_norm,
    aten.native_group_norm.default: torch.native_group_norm,
    aten.ones_like.default: torch.ones_like,
    aten.embedding.default: torch.embedding,
    aten.argmax.default: torch.argmax,
    aten.eq.Tensor: torch.eq,
    aten.sum.default: torch.sum,
}
_KEYWORDS_ONLY = {aten.ones_like.default: {"pin_memory", "memory_format"}}


@dataclass(frozen=True)
class Vectors:
    """What a step works on, each as long as the weights.

    `target` is q = pull · x − k, so that g + pull · (w − x) + k is g + pull · w − q: one vector for whatever
    holds or corrects the weights beside the loss.
    """

    weights: Tensor
    target: Tensor
    velocity: Tensor

    @classmethod
    def zeros(cls, size: int, device: torch.device) -> Vectors:
        """For `size` weights."""
        return cls(*(torch.zeros(size, device=device) for _ in range(3)))

    def begin(self, vector: Tensor, step: LocalStep, constant: Tensor | None) -> None:
        """A client begins at `vector`; what its step does not look at is left as it is."""
        self.weights.copy_(vector)
        if step.shifted:
            torch.mul(self.weights, step.pull, out=self.target)
        if constant is not None:
            self.target.sub_(constant.to(self.target.device))
        if step.momentum:
            self.velocity.zero_()


class StepProgram:
    """A step over weights that lie in one flat vector.

    `inputs` of the recording are the parameters (views of `weights`, in order) followed by the
    batch's tensors; its results are the loss and each parameter's gradient (None where unreached).
    """

    def __init__(
        self,
        recording: Recording,
        parameters: Sequence[Tensor],
        vectors: Vectors,
        step: LocalStep,
    ) -> None:
        self._recording = recording
        self.counts = recording.counts
        self._parameters = parameters
        self.rule = step
        self._names: dict[Ref, str] = {}
        self._globals: dict[str, Any] = {
            "weights": vectors.weights,
            "target": vectors.target,
            "velocity": vectors.velocity,
        }
        count = len(parameters)
        self._fixed: dict[Ref, Tensor] = dict(zip(recording.inputs[:count], parameters, strict=True))
        self._fixed.update(recording.constants)
        self._batch = recording.inputs[count:]
        self._loss, *self._gradients = recording.results
        self.source = self._write()
        self.run = self._compile(self.source)

    def _write(self) -> str:
        """The function's text: hoisted views first (run now), then the calls, then the step."""
        calls = [call for call in self._recording.calls if not self._hoisted(call)]
        calls = needed(calls, [ref for ref in self._recording.results if ref])
        fused, calls = self._fuse(calls) if self.rule.plain else ({}, calls)
        lines = [self._line(call) for call in calls]
        lines += self._update_lines(fused)
        loss = self._name(self._loss)
        return self._text_of_function(lines, loss, {loss})

    def _text_of_function(self, lines: Sequence[str], result: str, keep: Set[str]) -> str:
        lines = _with_deletions(lines, keep)
        arguments = ", ".join(["rate", *(self._name(ref) for ref in self._batch)])
        body = "\n    ".join([*lines, f"return {result}"])
        return f"def step({arguments}):\n    {body}\n"

    def _hoisted(self, call: Call) -> bool:
        """A view of weights or constants is made once, now."""
        if not call.is_view or not all(ref in self._fixed for ref in call.reads):
            return False
        result = refill(call, self._fixed)
        outputs = result if isinstance(result, (tuple, list)) else [result]
        self._fixed.update({ref: out for ref, out in zip(call.outputs, outputs, strict=True) if ref})
        return True

    def _fuse(self, calls: list[Call]) -> tuple[dict[int, str], list[Call]]:
        """Gradients that are one matrix product used for nothing else: parameter → statement."""
        makers = {call.outputs[0]: call for call in calls if call.operator is aten.mm.default}
        views = {call.outputs[0]: call for call in calls if call.operator is aten.t.default}
        uses: dict[Ref, int] = {}
        for ref in [*(r for call in calls for r in call.reads), *(g for g in self._gradients if g)]:
            uses[ref] = uses.get(ref, 0) + 1
        fused, gone = {}, set()
        for number, gradient in enumerate(self._gradients):
            turned = gradient in views
            inner = views[gradient].reads[0] if turned and gradient else gradient
            if inner is None or inner not in makers or uses[inner] != 1 or uses[gradient] != 1:  # type: ignore[index]
                continue
            fused[number] = self._product_line(number, makers[inner], turned)
            gone |= {inner, gradient}
        return fused, [call for call in calls if call.outputs[0] not in gone]

    def _product_line(self, number: int, made: Call, turned: bool) -> str:
        """A product, the gradient of a parameter or its transpose, goes straight into the parameter."""
        left, right = (self._name(ref) for ref in made.reads)
        pair = f"{right}.t(), {left}.t()" if turned else f"{left}, {right}"
        self._globals["addmm_"] = Tensor.addmm_
        return f"addmm_({self._bind(self._parameters[number])}, {pair}, alpha=-rate)"

    def _update_lines(self, fused: Mapping[int, str]) -> list[str]:
        rest = [n for n, gradient in enumerate(self._gradients) if gradient is not None and n not in fused]
        step = self.rule
        if not step.plain:
            return self._flat_update_lines(rest)
        lines = self._decay_lines()
        lines += fused.values()
        if rest:
            targets = self._bind([self._parameters[n] for n in rest])
            self._globals["foreach_add_"] = torch._foreach_add_
            gradients = ", ".join(self._name(self._gradients[n]) for n in rest)
            lines.append(f"foreach_add_({targets}, [{gradients}], alpha=-rate)")
        return lines

    def _decay_lines(self) -> list[str]:
        """Weight decay, a pull and a constant move every weight that has a gradient."""
        step = self.rule
        reached = [n for n, gradient in enumerate(self._gradients) if gradient is not None]
        if not reached:
            return []
        targets, attractors = self._lists(reached)
        lines = []
        if step.weight_decay or step.pull:
            self._globals["foreach_mul_"] = torch._foreach_mul_
            lines.append(f"foreach_mul_({targets}, 1.0 - rate * {step.weight_decay + step.pull!r})")
        if step.shifted:
            self._globals["foreach_add_"] = torch._foreach_add_
            lines.append(f"foreach_add_({targets}, {attractors}, alpha=rate)")
        return lines

    def _flat_update_lines(self, rest: Sequence[int]) -> list[str]:
        """Momentum and clipping look at the whole gradient: it is gathered in one vector."""
        step = self.rule
        if not rest:
            return []
        self._globals |= {"whole": torch.zeros_like(self._globals["weights"])}
        self._globals |= {"foreach_copy_": torch._foreach_copy_, "foreach_add_": torch._foreach_add_}
        gathered = self._bind([self._window(self._globals["whole"], n) for n in rest])
        targets, attractors = self._lists(rest)
        gradients = ", ".join(self._name(self._gradients[n]) for n in rest)
        lines = [f"foreach_copy_({gathered}, [{gradients}])"]
        if step.pull:
            lines.append(f"foreach_add_({gathered}, {targets}, alpha={step.pull!r})")
        if step.shifted:
            lines.append(f"foreach_add_({gathered}, {attractors}, alpha=-1.0)")
        if step.max_norm is not None:
            self._globals["norm"] = torch.linalg.vector_norm
            lines.append(f"whole.mul_(({step.max_norm!r} / (norm(whole) + 1e-6)).clamp_(max=1.0))")
        if step.weight_decay:
            lines.append(f"foreach_add_({gathered}, {targets}, alpha={step.weight_decay!r})")
        moved = gathered
        if step.momentum:
            self._globals["foreach_mul_"] = torch._foreach_mul_
            moved = self._bind([self._window(self._globals["velocity"], n) for n in rest])
            lines.append(f"foreach_mul_({moved}, {step.momentum!r})")
            lines.append(f"foreach_add_({moved}, {gathered})")
        lines.append(f"foreach_add_({targets}, {moved}, alpha=-rate)")
        return lines

    def _lists(self, numbers: Sequence[int]) -> tuple[str, str]:
        """Names of these parameters, and of their parts of the target."""
        targets = self._bind([self._parameters[n] for n in numbers])
        return targets, self._bind([self._window(self._globals["target"], n) for n in numbers])

    def _window(self, vector: Tensor, number: int) -> Tensor:
        """The part of a vector that lies where the parameter lies in the weights."""
        parameter = self._parameters[number]
        start = parameter.storage_offset() - self._globals["weights"].storage_offset()
        return vector[start : start + parameter.numel()].view(parameter.shape)

    def _line(self, call: Call) -> str:
        text = self._call_text(call)
        names = [self._name(ref) if ref else "_" for ref in call.outputs]
        if not call.outputs or (call.writes and all(ref in call.reads for ref in call.outputs if ref)):
            return text
        if len(call.operator._schema.returns) == 1 and not isinstance(
            call.operator._schema.returns[0].type, torch.ListType
        ):
            return f"{names[0]} = {text}"
        return f"{', '.join(names)}, = {text}"

    def _call_text(self, call: Call) -> str:
        function = _FAST.get(call.operator, call.operator)
        dropped = _KEYWORDS_ONLY.get(call.operator, set())
        arguments = [self._text(value) for value in call.arguments]
        arguments += [f"{k}={self._text(v)}" for k, v in call.options.items() if k not in dropped]
        return f"{self._bind(function)}({', '.join(arguments)})"

    def _text(self, value: Any) -> str:
        if isinstance(value, Ref):
            return self._name(value)
        if isinstance(value, (list, tuple)):
            return "[" + ", ".join(self._text(item) for item in value) + "]"
        if value is None or isinstance(value, (bool, int, str)):
            return repr(value)
        return self._bind(value)

    def _name(self, ref: Ref | None) -> str:
        assert ref is not None
        if ref in self._fixed:
            return self._bind(self._fixed[ref])
        return f"v{ref.number}"

    def _bind(self, value: Any) -> str:
        """A global name for a value that is not a local of the function."""
        for name, known in self._globals.items():
            if known is value:
                return name
        name = f"g{len(self._globals)}"
        self._globals[name] = value
        return name

    def _compile(self, source: str) -> Callable[..., Tensor]:
        scope = dict(self._globals)
        exec(compile(source, "<recorded step>", "exec"), scope)
        step: Callable[..., Tensor] = scope["step"]
        return step


def needed(calls: Sequence[Call], results: Sequence[Ref]) -> list[Call]:
    """Without the calls whose outputs nobody reads."""
    wanted, kept = set(results), []
    for call in reversed(calls):
        if call.writes or not wanted.isdisjoint(call.outputs):
            wanted.update(call.reads)
            kept.append(call)
    return kept[::-1]


def _with_deletions(lines: Sequence[str], keep: Set[str]) -> list[str]:
    """Each local is deleted after the line that uses it last, as autograd frees what it saved."""
    last: dict[str, int] = {}
    for number, line in enumerate(lines):
        for word in _words(line):
            if word[0] == "v" and word[1:].isdigit():
                last[word] = number
    ends: dict[int, list[str]] = {}
    for name, number in last.items():
        if name not in keep:
            ends.setdefault(number, []).append(name)
    out = []
    for number, line in enumerate(lines):
        out.append(line)
        if number in ends:
            out.append(f"del {', '.join(ends[number])}")
    return out


def _words(line: str) -> list[str]:
    return "".join(c if c.isalnum() or c == "_" else " " for c in line).split()
