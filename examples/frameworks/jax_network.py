"""JAX with Flax and Optax: a network of two layers, whose parameters travel as a flat dict of arrays."""

import jax
import numpy as np
import optax
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict
from sklearn.datasets import load_digits

import roundtable as rt


class Network(nn.Module):
    @nn.compact
    def __call__(self, rows):
        return nn.Dense(10)(nn.relu(nn.Dense(64)(rows)))


class JaxNetwork(rt.ArrayTask):
    def weights(self):
        return flat(Network().init(jax.random.key(0), np.zeros((1, 64), np.float32)))

    def data(self, site):
        pixels, labels = load_digits(return_X_y=True)
        mine = site.shard(labels)
        pixels, labels = pixels[mine].astype(np.float32) / 16, labels[mine]
        test = np.arange(len(labels)) % 5 == 0
        return (pixels[~test], labels[~test]), (pixels[test], labels[test])

    def fit(self, weights, data, options):
        rows, labels = data[0]
        tree, chance = unflatten_dict(weights, sep="."), np.random.default_rng(options["seed"])
        for _ in range(options["epochs"] or 1):
            order = chance.permutation(len(labels))
            for batch in np.array_split(order, max(1, len(order) // options["batch_size"])):
                tree, loss = step(tree, rows[batch], labels[batch], options["learning_rate"])
        return flat(tree), len(labels), {"loss": float(loss)}

    def evaluate(self, weights, data):
        rows, labels = data[1]
        loss, scores = mean_loss(unflatten_dict(weights, sep="."), rows, labels)
        right, count = int((np.asarray(scores).argmax(1) == labels).sum()), len(labels)
        return {"loss": (float(loss) * count, count), "accuracy": (right, count)}


def flat(tree):
    return {name: np.asarray(array) for name, array in flatten_dict(tree, sep=".").items()}


def mean_loss(tree, rows, labels):
    scores = Network().apply(tree, rows)
    return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean(), scores


@jax.jit
def step(tree, rows, labels, rate):
    (loss, _), slope = jax.value_and_grad(mean_loss, has_aux=True)(tree, rows, labels)
    return jax.tree.map(lambda weight, down: weight - rate * down, tree, slope), loss
