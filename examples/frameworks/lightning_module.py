"""PyTorch Lightning: a LightningModule and its Trainer as they are; the state_dict travels."""

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import roundtable as rt

SHOWN = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
QUIET = {"accelerator": "cpu", **dict.fromkeys(SHOWN, False)}


class Digits(L.LightningModule):
    def __init__(self, rate=0.1):
        super().__init__()
        self.rate = rate
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch, index):
        return cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.rate)


class LightningDigits(rt.ArrayTask):
    """The module's own training, whatever its hooks do. For a plain module rt.Task is shorter and faster."""

    def weights(self):
        return {name: value.numpy() for name, value in Digits().state_dict().items()}

    def data(self, site):
        pixels, labels = load_digits(return_X_y=True)
        mine = site.shard(labels)
        pixels, labels = torch.tensor(pixels[mine] / 16).float(), torch.tensor(labels[mine])
        test = torch.arange(len(labels)) % 5 == 0
        return TensorDataset(pixels[~test], labels[~test]), TensorDataset(pixels[test], labels[test])

    def fit(self, weights, data, options):
        model = filled(Digits(options["learning_rate"]), weights)
        L.Trainer(max_epochs=options["epochs"] or 1, **QUIET).fit(
            model, DataLoader(data[0], options["batch_size"], shuffle=True)
        )
        return {name: value.numpy() for name, value in model.state_dict().items()}, len(data[0]), {}

    def evaluate(self, weights, data):
        rows, labels = data[1].tensors
        with torch.no_grad():
            scores = filled(Digits(), weights).layers(rows)
        right, count = int((scores.argmax(1) == labels).sum()), len(labels)
        return {"loss": (float(cross_entropy(scores, labels)) * count, count), "accuracy": (right, count)}


def filled(model, weights):
    model.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
    return model
