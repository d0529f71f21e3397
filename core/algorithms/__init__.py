"""Algorithms: what a client does, what travels beside the model, what the server makes of it, its rates."""
