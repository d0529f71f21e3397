"""One batch of one client, tried before a job runs: what is odd about a task is said in words."""
