"""Code that was written for other frameworks: as tasks and at the second door."""
