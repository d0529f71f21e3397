"""Chooses a silo's strategy: the fastest that fits, by predicted seconds of a step."""
