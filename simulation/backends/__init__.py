"""The ways to run simulated clients: sequential, processes, recorded, stacked, Ray."""
