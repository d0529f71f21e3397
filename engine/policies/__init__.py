"""The two ways in which an attempt at a round comes by its updates: synchronous and buffered."""
