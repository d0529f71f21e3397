"""Algorithms whose clients end with models of their own (layouts and states of `core/algorithms`)."""
