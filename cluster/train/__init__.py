"""What a rank does in a round: batches, steps, checkpoints, and what ranks tell the agent."""
