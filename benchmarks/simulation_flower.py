"""Flower's simulation of the cases of benchmarks/simulation.py: run_simulation with two Ray actors.

    python simulation_flower.py CASE ROUNDS

Runs under an interpreter with simulation-flower-requirements.txt. Each actor keeps its model and its
clients' data between calls, which is the best that Flower's API allows.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from flwr.client import ClientApp, NumPyClient
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.simulation import run_simulation
from simulation_cases import CASES, model, say, shard
from torch.nn.functional import cross_entropy

CASE, ROUNDS = sys.argv[1], int(sys.argv[2])
CLIENTS, COHORT, TASK = CASES[CASE]


class Client(NumPyClient):
    def __init__(self, index: int) -> None:
        self.index = index

    def fit(self, parameters: Any, config: Any) -> Any:
        net, (inputs, targets) = model(TASK), shard(CLIENTS, self.index)
        with torch.no_grad():
            for own, new in zip(net.parameters(), parameters, strict=True):
                own.copy_(torch.from_numpy(new))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for rows in torch.randperm(len(inputs)).split(10):
            optimizer.zero_grad()
            cross_entropy(net(inputs[rows]), targets[rows]).backward()
            optimizer.step()
        return [p.detach().numpy() for p in net.parameters()], len(inputs), {}


class Timed(FedAvg):
    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        if failures or len(results) != COHORT:
            raise RuntimeError(f"{len(results)} results, failures: {failures[:1]}")
        done = super().aggregate_fit(server_round, results, failures)
        say(server_round)
        return done


def server(context: Any) -> ServerAppComponents:
    """FedAvg over a fixed share of the clients, without evaluation."""
    strategy = Timed(
        fraction_fit=COHORT / CLIENTS,
        fraction_evaluate=0.0,
        min_fit_clients=COHORT,
        min_available_clients=CLIENTS,
        initial_parameters=ndarrays_to_parameters([p.detach().numpy() for p in model(TASK).parameters()]),
    )
    return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=ROUNDS))


if __name__ == "__main__":
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    os.environ["PYTHONPATH"] = os.path.dirname(os.path.abspath(__file__))
    run_simulation(
        server_app=ServerApp(server_fn=server),
        client_app=ClientApp(
            client_fn=lambda context: Client(int(context.node_config["partition-id"])).to_client()
        ),
        num_supernodes=CLIENTS,
        backend_config={
            "init_args": {"num_cpus": 2, "include_dashboard": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
