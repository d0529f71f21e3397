"""Secure aggregation at the coordinator: attempts, their journals, and what drives them."""
