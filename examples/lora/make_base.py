"""Makes base.safetensors: the weights that every silo has before the job begins."""

from pathlib import Path

import safetensors.torch
import torch
from lora import Lora

torch.manual_seed(7)
state = Lora().model().state_dict()
frozen = {name: tensor for name, tensor in state.items() if ".up." not in name and ".down." not in name}
path = Path(__file__).with_name("base.safetensors")
safetensors.torch.save_file(frozen, path)
print(f"{path.name}: {sum(tensor.numel() for tensor in frozen.values()):,} parameters that never travel")
