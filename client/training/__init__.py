"""Local training and evaluation on one device, for silos and for simulated clients alike."""
