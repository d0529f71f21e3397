"""How a model is spread over devices: strategies, meshes, split tensors, stages, shards."""
