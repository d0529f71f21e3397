"""Clipping and noise: what is done to a vector so that its release is private."""
