"""What operators see of a running coordinator: incidents, alerts, counts and traces."""
