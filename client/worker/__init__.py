"""The training process beside the agent, and the second door for scripts of the user's own."""
