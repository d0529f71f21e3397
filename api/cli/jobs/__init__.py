"""Commands about jobs: submit, watch, diagnose, privacy."""
