"""What the coordinator and its colluders can compute about an honest silo's vector is uniform noise.

The adversary here has everything: all messages, the secrets that unmasking reveals, and the private
keys of the colluding silos. From an honest upload it takes away every mask that it knows. What is left
must be uniform on the ring whatever the vector is, and, as a check that nothing was overlooked, the
leftovers of all honest silos must add up to exactly the sum of their vectors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats

from roundtable.privacy.secagg import ServerPhase, Session, choose_parameters, keys
from roundtable.privacy.secagg.framing import unseal
from roundtable.privacy.secagg.masks import MaskSum
from roundtable.privacy.secagg.recovery import Reconstruction

LENGTH = 20_000
SIGNIFICANCE = 1e-6


def leftovers(run: Any, colluders: set[int]) -> dict[int, np.ndarray]:
    """Every honest silo's upload without the masks that coordinator and colluders know together."""
    n = len(run.names)
    private = {index: bytes(run.clients[index]._mask_keys.private_bytes()) for index in colluders}
    run.until(ServerPhase.UNMASK)
    for index in range(n):
        run.answer(index)
    server = run.server
    binding, adverts = server.cohort.binding, server._adverts
    reconstruction = Reconstruction(server.cohort, server._revealed)
    uploads = {server.cohort.names.index(name): body for name, body in run_bodies(run)}
    left = {}
    for index in set(range(n)) - colluders:
        seed = reconstruction.secret(index, lambda _: True)
        plus, minus = [keys.self_mask_key(seed, binding, index)], []
        for peer in colluders & set(server.cohort.graph.neighbours(index)):
            shared = keys.KeyPair(private[peer]).agree(adverts[index].mask_key, "honest")
            (plus if index < peer else minus).append(keys.mask_key(shared, binding, index, peer))
        left[index] = np.frombuffer(uploads[index], dtype="<u4").copy()
        MaskSum(32, minus, plus).add_to(left[index])
    return left


def run_bodies(run: Any) -> list[tuple[str, bytes]]:
    return [(unseal(message).sender, body) for message, body in run.received if body is not None]


def looks_uniform(values: np.ndarray) -> bool:
    """Each of the four bytes by chi-square, and the words by Kolmogorov-Smirnov, at 10^-6 in all."""
    lanes = values.view(np.uint8).reshape(-1, 4)
    tests = [stats.chisquare(np.bincount(lanes[:, lane], minlength=256)).pvalue for lane in range(4)]
    tests.append(stats.kstest(values / 2.0**32, "uniform").pvalue)
    return min(tests) > SIGNIFICANCE / len(tests)


def vectors(n: int, first: int) -> list[np.ndarray]:
    """Silo 0 submits a constant; the others small numbers that are far from uniform."""
    return [np.full(LENGTH, first if index == 0 else index, dtype=np.uint32) for index in range(n)]


@pytest.mark.parametrize("first", [0, 0xFFFFFFFF, 12345])
def test_an_honest_vector_is_hidden_from_coordinator_and_colluders(attempt: Any, first: int) -> None:
    """n = 7, t = 5: two colluders, the most that leave the honest silos able to finish alone."""
    plan = choose_parameters(7, 0.29, 0.2)
    assert plan.n - plan.t == 2
    run = attempt(7, plan, session=Session("job", 0, 0, LENGTH), vectors=vectors(7, first))
    left = leftovers(run.until(ServerPhase.MASKED), {1, 4})
    assert all(looks_uniform(values) for values in left.values())
    total = np.sum(list(left.values()), axis=0, dtype=np.uint32)
    np.testing.assert_array_equal(total, run.expected(left))


def test_two_different_vectors_cannot_be_told_apart(attempt: Any) -> None:
    """Two-sample tests, word by word and bit by bit, on what is left of a vector of zeros and one of ones."""
    plan = choose_parameters(7, 0.29, 0.2)
    samples = []
    for first in (0, 1):
        run = attempt(7, plan, session=Session("job", 0, 0, LENGTH), vectors=vectors(7, first))
        samples.append(leftovers(run.until(ServerPhase.MASKED), {1, 4})[0])
    assert stats.ks_2samp(samples[0], samples[1]).pvalue > SIGNIFICANCE
    bits = [
        np.unpackbits(sample.view(np.uint8)).reshape(-1, 32).sum(axis=0, dtype=np.int64) for sample in samples
    ]
    scores = np.abs(bits[0] - bits[1]) / np.sqrt(LENGTH / 2)
    assert scores.max() < stats.norm.isf(SIGNIFICANCE / 64)


def test_the_sparse_graph_hides_as_well(attempt: Any) -> None:
    """Six colluders of sixty; the victim's honest neighbours cover it."""
    plan = choose_parameters(60, 0.1, 0.1)
    run = attempt(60, plan, session=Session("job", 0, 0, LENGTH), vectors=vectors(60, 7))
    left = leftovers(run.until(ServerPhase.MASKED), {1, 4, 11, 30, 31, 59})
    assert looks_uniform(left[0])
    total = np.sum(list(left.values()), axis=0, dtype=np.uint32)
    np.testing.assert_array_equal(total, run.expected(left))


def test_the_test_would_notice_a_leak(attempt: Any) -> None:
    """With everybody else colluding the sum is the victim's vector: the adversary above finds it."""
    run = attempt(5, session=Session("job", 0, 0, LENGTH), vectors=vectors(5, 77))
    left = leftovers(run.until(ServerPhase.MASKED), {1, 2, 3, 4})
    np.testing.assert_array_equal(left[0], run.vectors[0])
    assert not looks_uniform(left[0])


def test_the_masks_of_two_rounds_are_unrelated(attempt: Any) -> None:
    """The difference of one silo's uploads in two attempts is uniform: no mask is used again."""
    uploads = []
    signers = None
    for number in range(2):
        run = attempt(4, session=Session("job", 0, number, LENGTH), vectors=vectors(4, 3), signers=signers)
        signers = run.signers
        run.until(ServerPhase.MASKED)
        run.clients[0].handle(run.messages[run.names[0]])
        uploads.append(np.frombuffer(run.masked(0)[1], dtype="<u4"))
    assert looks_uniform(uploads[0] - uploads[1])
    assert looks_uniform(np.diff(uploads[0]))
