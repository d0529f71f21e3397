"""What a simulation leaves for people: history, comparison, plots, the run's folder."""
