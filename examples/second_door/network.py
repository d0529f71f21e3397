"""What the coordinator needs to know of `train_network.py`: the model, for its first weights."""

from torch import nn

import roundtable as rt


def network() -> nn.Module:
    """64 pixels in, 10 digits out."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


class Network(rt.Task):
    """Only the model: the silos train with scripts of their own."""

    def model(self) -> nn.Module:
        return network()
