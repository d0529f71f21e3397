"""The agent's side of a silo's cluster: it starts the ranks, watches them, and asks them for work."""
