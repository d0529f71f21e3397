"""Training data that are read in order: where a client's reading stands, and going on from there."""
