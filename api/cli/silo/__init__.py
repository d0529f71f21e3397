"""Commands of a silo: its agent, its cluster, its answers to jobs."""
