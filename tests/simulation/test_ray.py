"""A real Ray cluster of two nodes on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from roundtable.core.task import load_task
from roundtable.simulation import simulate
from roundtable.simulation.backends import ray_cluster

HERE = Path(__file__).parent

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install roundtable-fl[ray]")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster():
    """Two nodes of one core each, as two machines would be."""
    from ray.cluster_utils import Cluster

    small = {"num_cpus": 1, "object_store_memory": 80 << 20}
    made = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
    made.add_node(**small)
    ray.init(address=made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.mark.parametrize("task", ["Perceptron", "BatchNorm", "Text"])
def test_updates_summed_on_their_nodes_give_the_sequential_model(cluster, run, task):
    reference = run(task, rounds=2)
    result = run(task, rounds=2, simulation__backend="ray")
    assert "2 actors on 2 Ray nodes, updates summed on their nodes" in result.backend
    assert torch.allclose(result.model.vector, reference.model.vector, atol=2e-6)
    assert result.history["accuracy"] == pytest.approx(reference.history["accuracy"])
    assert result.history.records[0].weights == pytest.approx(reference.history.records[0].weights)


def test_updates_that_are_too_long_are_left_out_of_their_sum(cluster, run):
    settings = {"rounds": 2, "aggregation__validation__norm_ratio": 1.0}
    reference, result = run(**settings), run(**settings, simulation__backend="ray")
    assert "summed on their nodes" in result.backend
    assert result.history["excluded"] == reference.history["excluded"]
    assert torch.allclose(result.model.vector, reference.model.vector, atol=2e-6)


def test_for_a_robust_rule_updates_come_back_whole(cluster, run):
    settings = {
        "rounds": 2,
        "aggregation__rule": "median",
        "simulation__attack": {"name": "sign_flip", "count": 2},
        "transfer__up": "bfloat16",
    }
    reference = run(**settings)
    result = run(**settings, simulation__backend="ray")
    assert "sent back whole" in result.backend
    assert torch.equal(result.model.vector, reference.model.vector)


def test_over_selection_and_devices_in_virtual_time(cluster, run):
    settings = {
        "rounds": 2,
        "cohort__over_selection": 1.6,
        "simulation__devices": {"speed": {"median": 10.0, "sigma": 1.0}},
    }
    reference = run(**settings)
    result = run(**settings, simulation__backend="ray")
    assert torch.allclose(result.model.vector, reference.model.vector, atol=2e-6)
    assert result.history["time"] == reference.history["time"]


def test_a_dead_actor_is_replaced_and_its_updates_made_again(cluster, run, monkeypatch):
    reference = run(rounds=2)
    original, killed = ray_cluster.RayCluster.total, []

    def kill_one_first(self, weights):
        if not killed:
            killed.append(self._actors[0])
            ray.kill(killed[0].handle)
        return original(self, weights)

    monkeypatch.setattr(ray_cluster.RayCluster, "total", kill_one_first)
    result = run(rounds=2, simulation__backend="ray")
    assert killed
    assert torch.allclose(result.model.vector, reference.model.vector, atol=2e-6)


def test_a_task_of_a_function_is_carried_to_the_nodes(cluster, run, make_job):
    """A class that no module of a node has, with a value and a closure of its own."""

    class Local(type(load_task("worlds.py:Perceptron", HERE))):
        def loss(self, model, batch):
            return super().loss(model, batch) * self.by

    task = Local()
    task.by = 0.5
    reference = simulate(make_job(rounds=2), task)
    result = simulate(make_job(rounds=2, simulation__backend="ray"), task)
    assert "2 actors on 2 Ray nodes" in result.backend
    assert torch.allclose(result.model.vector, reference.model.vector, atol=2e-6)
