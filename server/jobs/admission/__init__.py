"""How a job comes in, and who gives it its turn."""
