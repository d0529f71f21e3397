"""Published tables of federated learning, run again with their authors' settings: docs/reproduction.md."""
