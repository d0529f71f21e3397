"""The silo's side: local training, and the agent that takes part in rounds."""

from roundtable.client.batches import NoExamples
from roundtable.client.training import LocalUpdate, evaluate, split_data, train

__all__ = ["LocalUpdate", "NoExamples", "evaluate", "split_data", "train"]
