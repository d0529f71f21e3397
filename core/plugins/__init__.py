"""Code that a job names: how it is found, and what may be called of it."""
