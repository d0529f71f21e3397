"""pfl-research on the cases of benchmarks/simulation.py: two processes that share a cohort.

    python simulation_pfl.py CASE ROUNDS

Runs under an interpreter with simulation-pfl-requirements.txt. The first process starts the second
one and is the first of two ranks itself; each rank trains every second client of the cohort and the
statistics are summed by all-reduce, as pfl does on several GPUs.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import Any

from simulation_cases import CASES, images, make_cnn, make_perceptron, say


def become_two() -> subprocess.Popen[bytes] | None:
    """Starts rank 1, unless this is it; must come before pfl is imported, which reads the environment."""
    if "RANK" in os.environ:
        return None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    # What torchrun sets, without the seconds that it takes.
    shared["TORCHELASTIC_RUN_ID"] = "benchmark"
    other = {**os.environ, **shared, "RANK": "1", "LOCAL_RANK": "1"}
    os.environ.update({**shared, "RANK": "0", "LOCAL_RANK": "0"})
    return subprocess.Popen([sys.executable, *sys.argv], env=other, stdout=subprocess.DEVNULL)


def train(case: str, rounds: int) -> None:
    """FederatedAveraging with the simulated backend."""
    import numpy as np
    import torch
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel
    from torch.nn.functional import cross_entropy

    class Net(torch.nn.Module):
        def __init__(self, net: torch.nn.Module) -> None:
            super().__init__()
            self.net = net

        def loss(self, x: Any, y: Any, is_eval: bool = False) -> Any:
            return cross_entropy(self.net(x), y)

        def metrics(self, x: Any, y: Any, is_eval: bool = True) -> dict[str, Any]:
            return {}

    class Say(TrainingProcessCallback):
        def after_central_iteration(
            self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int
        ) -> tuple[bool, Metrics]:
            say(central_iteration + 1)
            return False, Metrics()

    torch.set_num_threads(1)
    # Both ranks must make the same model and draw the same cohorts.
    torch.manual_seed(0)
    np.random.seed(0)
    clients, cohort, task = CASES[case]
    pictures, labels = images()
    shards = np.random.default_rng(0).permutation(60000).reshape(clients, -1)
    users = [
        Dataset((torch.from_numpy(pictures[rows]).float().div_(255.0), torch.from_numpy(labels[rows]).long()))
        for rows in shards
    ]
    data = FederatedDataset(lambda index: users[index], get_user_sampler("random", list(range(clients))))
    net = Net(make_perceptron() if task == "Perceptron" else make_cnn())
    model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
    parameters = NNAlgorithmParams(
        central_num_iterations=rounds,
        evaluation_frequency=rounds + 1,
        train_cohort_size=cohort,
        val_cohort_size=0,
    )
    hyper = NNTrainHyperParams(local_num_epochs=1, local_learning_rate=0.1, local_batch_size=10)
    FederatedAveraging().run(parameters, SimulatedBackend(data, None), model, hyper, None, callbacks=[Say()])


if __name__ == "__main__":
    second = become_two()
    train(sys.argv[1], int(sys.argv[2]))
    if second is not None:
        second.wait()
