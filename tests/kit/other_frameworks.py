"""Apps and scripts written anew after the APIs of other frameworks: two quickstarts, a query, a script."""

from __future__ import annotations

from pathlib import Path

TORCH_TASK = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x):
        return self.fc2(torch.relu(self.norm(self.fc1(x))))

def load_data(partition_id, num_partitions, batch_size):
    chance = torch.Generator().manual_seed(partition_id)
    labels = torch.arange(24 + 12 * partition_id) % 3
    rows = torch.randn(len(labels), 4, generator=chance) + labels[:, None]
    data = torch.utils.data.TensorDataset(rows, labels)
    loader = torch.utils.data.DataLoader(data, batch_size=batch_size)
    return loader, loader

def train(net, loader, epochs, lr):
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    net.train()
    for _ in range(epochs):
        for rows, labels in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(net(rows), labels)
            loss.backward()
            optimizer.step()
    return loss.item()

def test(net, loader):
    net.eval()
    rows, labels = loader.dataset.tensors
    with torch.no_grad():
        out = net(rows)
    return torch.nn.functional.cross_entropy(out, labels).item(), (out.argmax(1) == labels).float().mean()
"""

TORCH_CLIENT = """
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.logger import log
from quickstart.task import Net, load_data
from quickstart.task import test as test_fn
from quickstart.task import train as train_fn

app = ClientApp()

@app.train()
def train(msg: Message, context: Context):
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    partition_id = context.node_config["partition-id"]
    num_partitions = context.node_config["num-partitions"]
    loader, _ = load_data(partition_id, num_partitions, context.run_config["batch-size"])
    epochs = context.run_config["local-epochs"]
    loss = train_fn(model, loader, epochs, msg.content["config"]["lr"])
    metrics = {"train_loss": loss, "num-examples": len(loader.dataset)}
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(metrics)})
    return Message(content=content, reply_to=msg)

@app.evaluate()
def evaluate(msg: Message, context: Context):
    from flwr.app import MetricRecord as LateRecord
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    _, loader = load_data(context.node_config["partition-id"], 3, context.run_config["batch-size"])
    loss, accuracy = test_fn(model, loader)
    count = len(loader.dataset)
    metrics = LateRecord({"eval_loss": loss, "eval_acc": float(accuracy), "num-examples": count})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=msg)
"""

SKLEARN_CLIENT = """
import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss

app = ClientApp()

def first():
    return [np.zeros((3, 4)), np.zeros(3)]

def model_of(arrays, context):
    model = LogisticRegression(penalty=context.run_config["penalty"], max_iter=1, warm_start=True)
    model.classes_ = np.arange(3)
    model.coef_, model.intercept_ = arrays.to_numpy_ndarrays()
    return model

def data_of(context):
    number = context.node_config["partition-id"]
    y = np.arange(60 + 30 * number) % 3
    return np.random.default_rng(number).normal(size=(len(y), 4)) + y[:, None], y

@app.train()
def train(msg: Message, context: Context):
    import warnings
    model = model_of(msg.content["arrays"], context)
    x, y = data_of(context)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(x, y)
    metrics = {"num-examples": len(x), "train_logloss": log_loss(y, model.predict_proba(x))}
    content = RecordDict({"arrays": ArrayRecord([model.coef_, model.intercept_]),
                          "metrics": MetricRecord(metrics)})
    return Message(content=content, reply_to=msg)

@app.evaluate()
def evaluate(msg: Message, context: Context):
    model = model_of(msg.content["arrays"], context)
    x, y = data_of(context)
    metrics = {"num-examples": len(x), "accuracy": model.score(x, y)}
    return Message(content=RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)
"""

TORCH_SERVER = """
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAdam
from quickstart.task import Net

app = ServerApp()

@app.main()
def main(grid: Grid, context: Context):
    fraction_train: float = context.run_config["fraction-train"]
    num_rounds: int = context.run_config["num-server-rounds"]
    lr = context.run_config["learning-rate"]
    global_model = Net()
    arrays = ArrayRecord(global_model.state_dict())
    strategy = FedAdam(fraction_train=fraction_train, eta=0.05)
    result = strategy.start(
        grid=grid,
        initial_arrays=arrays,
        train_config=ConfigRecord({"lr": lr}),
        num_rounds=num_rounds,
        evaluate_fn=print,
    )
"""

PANDAS_CLIENT = """
import numpy as np
import pandas as pd
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

@app.query()
def query(msg: Message, context: Context):
    frame = pd.read_csv(context.run_config["file"])
    selected = msg.content["config"]["selected_features"]
    metrics = {}
    for feature in selected:
        hist, _ = np.histogram(frame[feature], bins=np.linspace(2.0, 10.0, 9))
        metrics[feature] = hist.tolist()
        metrics[f"{feature}_sum"] = frame[feature].sum()
        metrics[f"{feature}_count"] = len(frame)
    return Message(RecordDict({"query_results": MetricRecord(metrics)}), reply_to=msg)
"""

FLARE_JOB = """
from network import Network
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe

def main():
    n_clients = 2
    recipe = FedAvgRecipe(
        name="hello-pt",
        min_clients=n_clients,
        num_rounds=3,
        initial_model=Network(),
        train_script="client.py",
        train_args="--lr 0.25",
        key_metric="accuracy",
    )
    recipe.export("/tmp/job")
"""

FLARE_SCRIPT = """
import argparse
import torch
from torch import nn
import nvflare.client as flare
from nvflare.client.tracking import SummaryWriter

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.5)
    args = parser.parse_args()
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    rows, labels = torch.ones(12, 4), torch.arange(12) % 3
    flare.init()
    writer = SummaryWriter()
    print("site", flare.system_info()["site_name"])
    while flare.is_running():
        input_model = flare.receive()
        print(f"round {input_model.current_round} of {input_model.total_rounds}")
        model.load_state_dict(input_model.params)
        accuracy = 100 * (model(rows).argmax(1) == labels).sum().item() // len(labels)
        loss = nn.functional.cross_entropy(model(rows), labels)
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for weight in model.parameters():
                weight -= args.lr * weight.grad
        writer.add_scalar("train_loss", loss.item(), global_step=input_model.current_round)
        flare.send(flare.FLModel(
            params=model.cpu().state_dict(),
            metrics={"accuracy": accuracy},
            meta={"NUM_STEPS_CURRENT_ROUND": 12},
        ))
        assert input_model.params is None

if __name__ == "__main__":
    main()
"""

PYPROJECT = """
[tool.flwr.app.components]
serverapp = "quickstart.server_app:app"
clientapp = "quickstart.client_app:app"

[tool.flwr.app.config]
num-server-rounds = 3
fraction-train = 0.5
learning-rate = 0.05
batch-size = 12
local-epochs = 1
penalty = "l2"

[tool.flwr.federations.local-simulation]
options.num-supernodes = 6
"""


def write_quickstart(folder: Path, name: str, client: str = TORCH_CLIENT) -> None:
    """The files of a Flower project, whose package is called `name`."""
    package = folder / name
    package.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PYPROJECT.replace("quickstart", name))
    texts = {"__init__": "", "task": TORCH_TASK, "client_app": client, "server_app": TORCH_SERVER}
    for file, text in texts.items():
        (package / f"{file}.py").write_text(text.replace("quickstart", name))
