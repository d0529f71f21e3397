"""What a model carries from batch to batch beside its parameters: no clip bounds it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from roundtable.core.errors import PrivacyError


class HeldState:
    """The floating-point buffers of a model as its private training began.

    What one example leaves in a buffer reaches the gradients of others in later steps, and clipping its own
    bounds none of that.
    """

    def __init__(self, model: nn.Module) -> None:
        self._held = [
            (f"{place}.{name}" if place else name, module, name, buffer.detach().clone())
            for place, module in model.named_modules()
            for name, buffer in module.named_buffers(recurse=False)
            if buffer.is_floating_point()
        ]
        self._seen = [self._now(module, name) for _, module, name, _ in self._held]

    def check(self) -> None:
        """Raises `PrivacyError` for a buffer that holds something else now."""
        for place, (said, module, name, before) in enumerate(self._held):
            now = self._now(module, name)
            if now == self._seen[place]:
                continue
            buffer = module._buffers.get(name)
            if buffer is None or not torch.equal(buffer, before):
                raise PrivacyError(
                    f"training changes the buffer {said!r}: what one example leaves in it reaches the "
                    "gradients of others, and the noise is too little; leave it alone in training, or out of "
                    "the model"
                )
            self._seen[place] = now

    @staticmethod
    def _now(module: nn.Module, name: str) -> tuple[int, int]:
        """Which tensor it is, and how often that was written to."""
        buffer: Tensor | None = module._buffers.get(name)
        return id(buffer), 0 if buffer is None else buffer._version
