"""Questions that are answered under differential privacy: one release of sums of bounded sensitivity."""
