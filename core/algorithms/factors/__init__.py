"""Algorithms for low-rank factors whose rank differs by client (layouts and states of `core/algorithms`)."""
