"""What the coordinator needs of `train_starter.py`: the model, for the weights that round 1 begins with."""

from torch import nn

import roundtable as rt

FEATURES, CLASSES = 8, 3


def network() -> nn.Module:
    """Numbers [batch, FEATURES] → scores [batch, CLASSES]."""
    return nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, CLASSES))


class Starter(rt.Task):
    """Only the model: the silos train with a script of their own."""

    def model(self) -> nn.Module:
        return network()
