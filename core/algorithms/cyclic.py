"""Cyclic weight transfer: one silo's model is where the next one starts (Chang et al. 2018)."""

from __future__ import annotations

from roundtable.core.algorithms.contract import ClientAlgorithm, Composition


class Cyclic(ClientAlgorithm):
    """A round is one hop: a single silo trains, in turn, and its model becomes the global one.

    Every hop is a commit, so that a job that was stopped goes on at the silo whose turn it is.
    """

    composition = Composition(
        own_optimizers=True,
        schedule=True,
        arrays=True,
        masked=False,
        server_optimizer=False,
        one_by_one=True,
        rules="mean",
        reason="each round's model is one silo's own",
    )
