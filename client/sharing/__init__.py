"""What of the agent's own log leaves the silo: shared lines, and what operators may ask for."""
