"""Which strategy fits a model and a silo's devices: traced, estimated, measured, chosen."""
