"""A task that trains in no time, for tests of everything around it."""

SMALL = """
import torch
from torch import nn
from torch.nn import functional as F
from roundtable.core import Task

class Toy(Task):
    def model(self):
        return nn.Linear(4, 2)
    def data(self, site):
        x = torch.randn(16, 4)
        return (x, x[:, :2].argmax(1)), (x, x[:, :2].argmax(1))
    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])
"""
