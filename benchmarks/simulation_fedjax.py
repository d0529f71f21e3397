"""FedJAX on the cases of benchmarks/simulation.py: its federated averaging with the jit backend.

    python simulation_fedjax.py CASE ROUNDS

Runs under an interpreter with simulation-fedjax-requirements.txt.
"""

# JAX must be told its platform, and given old names, before FedJAX is imported.
# ruff: noqa: E402
from __future__ import annotations

import os
import sys
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

# FedJAX 0.0.17 calls these by names that JAX has since dropped.
for _name in ("tree_map", "tree_leaves", "tree_flatten", "tree_unflatten", "tree_structure"):
    if not hasattr(jax, _name):
        setattr(jax, _name, getattr(jax.tree_util, _name))

import fedjax
import jax.numpy as jnp
import numpy as np
from fedjax.algorithms import fed_avg
from simulation_cases import CASES, images, say

CASE, ROUNDS = sys.argv[1], int(sys.argv[2])
CLIENTS, COHORT, TASK = CASES[CASE]


def dense(key: Any, inside: int, outside: int) -> dict[str, Any]:
    """A layer as torch initialises it."""
    bound = 1 / np.sqrt(inside)
    first, second = jax.random.split(key)
    shape = (inside, outside)
    return {
        "w": jax.random.uniform(first, shape, minval=-bound, maxval=bound),
        "b": jax.random.uniform(second, (outside,), minval=-bound, maxval=bound),
    }


def perceptron(params: Any, x: Any) -> Any:
    """784-200-200-10."""
    x = x.reshape(len(x), -1)
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def cnn(params: Any, x: Any) -> Any:
    """McMahan's."""
    x = x.reshape(len(x), 28, 28, 1)
    for layer in params[:2]:
        kernel = layer["w"].reshape(5, 5, x.shape[-1], -1)
        x = jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x + layer["b"])
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return perceptron(params[2:], x)


def main() -> None:
    pictures, labels = images()
    chance = np.random.default_rng(0)
    shards = chance.permutation(60000).reshape(CLIENTS, -1)
    inputs = pictures.astype(np.float32) / 255.0
    data = fedjax.InMemoryFederatedData(
        {index: {"x": inputs[rows], "y": labels[rows].astype(np.int32)} for index, rows in enumerate(shards)}
    )
    keys = jax.random.split(jax.random.PRNGKey(0), 4)
    if TASK == "Perceptron":
        sizes, apply = [(784, 200), (200, 200), (200, 10)], perceptron
    else:
        sizes, apply = [(25, 32), (800, 64), (3136, 512), (512, 10)], cnn
    params = [dense(key, *size) for key, size in zip(keys, sizes, strict=False)]

    def loss(params: Any, batch: Any, rng: Any) -> Any:
        scores = jax.nn.log_softmax(apply(params, batch["x"]))
        return -jnp.take_along_axis(scores, batch["y"][:, None], axis=1).mean()

    algorithm = fed_avg.federated_averaging(
        jax.grad(loss),
        fedjax.optimizers.sgd(0.1),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=10, num_epochs=1),
    )
    sampler = fedjax.client_samplers.UniformGetClientSampler(data, num_clients=COHORT, seed=0)
    state = algorithm.init(params)
    for number in range(1, ROUNDS + 1):
        state, _ = algorithm.apply(state, sampler.sample())
        jax.block_until_ready(state.params)
        say(number)


if __name__ == "__main__":
    main()
