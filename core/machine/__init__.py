"""What this system can do: the only place that asks, and does the same in another way where it cannot."""
