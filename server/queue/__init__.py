"""Whose turn it is: jobs and silos as the queue sees them, and the decision, without I/O."""
