"""Turns gradients of many ranks into a step: how they travel, their norm, the optimizers."""
