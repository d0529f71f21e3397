"""Blocks whose forward and backward passes torch.compile makes kernels of; plain again where it cannot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn


class CompiledBlocks:
    """The repeated parts of a model, compiled one by one while it is on: gathering and reducing stay between.

    `failed` is the first thing that the compiler raised here; every block is plain from then on.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self.failed = ""
        self._blocks = list(dict.fromkeys(blocks))
        self._before: list[tuple[nn.Module, Any]] = []

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def on(self) -> bool:
        """Whether passes that gradients are taken of go through compiled kernels."""
        return bool(self._before) and not self.failed

    def turn_on(self) -> None:
        """Has the next training pass compile them; what does not train stays plain."""
        from torch._functorch import config as gradients
        from torch._inductor import config as kernels

        # The same masks of dropout as without; a backward pass that cannot be compiled shows in the forward.
        kernels.fallback_random = True
        gradients.force_non_lazy_backward_lowering = True
        for block in self._blocks:
            self._before.append((block, vars(block).get("forward")))
            block.forward = self._tried(block.forward)

    def turn_off(self) -> None:
        """Puts the plain passes back."""
        for block, before in self._before:
            del block.forward
            if before is not None:
                block.forward = before
        self._before.clear()

    def _tried(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        # In one graph, so that what fails does so before anything of the block has run.
        compiled = torch.compile(plain, fullgraph=True)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.failed or not torch.is_grad_enabled():
                return plain(*args, **kwargs)
            try:
                return compiled(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - what a compiler raises has no class in common
                # A mistake of the task's own is raised here once more.
                result = plain(*args, **kwargs)
                lines = str(error).strip().splitlines() or [""]
                self.failed = f"{type(error).__name__}: {lines[0]}"[:300]
                return result

        return forward
