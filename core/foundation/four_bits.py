"""A frozen base in 4 bits: NormalFloat with double quantisation (Dettmers et al. 2023, section 3), by
bitsandbytes, which only CUDA runs as it is written.

What a layer's 4-bit values mean is in tensors that are no parameters and no buffers, and yet in its state
dict: taken for buffers they would be averaged. They are left out of it, and pinned by their digest.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
from blake3 import blake3
from torch import nn

from roundtable.core.errors import TaskError
from roundtable.core.tensor_spec import digest_of_values

PRECISION = "nf4"


def check_four_bits() -> None:
    """TaskError on a machine where bitsandbytes or a CUDA GPU is missing."""
    where = f'task: precision = "{PRECISION}" (a base in 4 bits)'
    if find_spec("bitsandbytes") is None:
        raise TaskError(
            f"{where} needs bitsandbytes, which is not installed on this machine, beside a CUDA GPU: "
            '`pip install bitsandbytes`, or set precision = "bfloat16"'
        )
    if not torch.cuda.is_available():
        raise TaskError(
            f"{where} needs a CUDA GPU, and torch finds none on this machine: on a CPU bitsandbytes lays "
            'frozen weights out anew while it works; train on a GPU, or set precision = "bfloat16"'
        )


def four_bits(transformers: Any) -> dict[str, Any]:
    """What `from_pretrained` is told. Values are rounded on the CPU, alike whatever GPU there is."""
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    return {"quantization_config": config, "device_map": {"": "cpu"}}


def pin_scales(model: nn.Module) -> None:
    """Leaves what 4-bit values mean out of the model's state dict, and puts its digest there, as a frozen
    parameter. TaskError where no layer is in 4 bits."""
    told = []
    for name, module in _quantised(model):
        state: Any = module.weight
        scales = sorted(state.quant_state.as_dict(packed=True).items())
        told += [f"{name}.{key} {digest_of_values(value)}" for key, value in scales]
        module.register_state_dict_post_hook(_without_scales)  # type: ignore[no-untyped-call]
    if not told:
        raise TaskError(
            f'task: precision = "{PRECISION}": this kind of model has no layer that goes in 4 bits'
        )
    digest = torch.tensor(list(blake3("\n".join(told).encode()).digest()), dtype=torch.float32)
    model.register_parameter("scales_of_four_bits", nn.Parameter(digest, requires_grad=False))


def _quantised(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if getattr(getattr(module, "weight", None), "quant_state", None) is not None:
            yield name, module


def _without_scales(module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    for name in [name for name in state if name.startswith(f"{prefix}weight.")]:
        del state[name]
